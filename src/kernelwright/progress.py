"""A progress bar for commands that take longer than two seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

# called with a name and a number of steps; returns the function to call after each step
Show = Callable[[str, int], Callable[[], None]]


def show_nothing(name: str, steps: int) -> Callable[[], None]:
    return lambda: None


@contextmanager
def steps_shown(console: Console, *, quiet: bool) -> Iterator[Show]:
    """Show the bar during a `with` block, on a terminal: a file would get an empty line."""
    if quiet or not (console.is_terminal or console.is_jupyter):
        yield show_nothing
        return
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(name: str, steps: int) -> Callable[[], None]:
            progress.reset(task, description=name, total=steps)
            return lambda: progress.advance(task)

        yield show
