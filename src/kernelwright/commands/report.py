"""`kernelwright report` and `kernelwright compare`: a page of results, and two runs compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .shared_options import JsonOption

if TYPE_CHECKING:
    from ..report import Comparison

SHOWN_CHANGES = 60


def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS",
            help="JSON files that `--out` of other commands wrote, or folders of them.",
            show_default=False,
        ),
    ],
    html: Annotated[
        Path, typer.Option("--html", help="Write the page to this file.", show_default=False)
    ],
    png: Annotated[
        Path | None,
        typer.Option("--png", help="Also write the charts as PNG files into this folder."),
    ] = None,
) -> None:
    """Write one HTML page from result files: tables, charts and the environment they come from.

    The page is one file without scripts or links: it opens anywhere, on a phone and in dark mode.
    `--png` draws the charts with matplotlib, which `pip install 'kernelwright[bench]'` installs.
    """
    with _one_line("report"):
        from .. import report as reports
        from ..measure.results import check_writable

        files = reports.read(results)
        check_writable(html, "--html")
        if png is not None:
            check_writable(png / "chart.png", "--png")
        html.write_text(reports.page(files), encoding="utf-8")
        typer.echo(f"{html}: {len(files)} result file{'s' if len(files) != 1 else ''}")
        if png is not None:
            from ..report.png import draw

            for picture in draw(files, png):
                typer.echo(str(picture))


def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="The run before: a file or a folder.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The run now: a file or a folder.")],
    threshold: Annotated[
        float, typer.Option(min=0.0, help="Ignore changes up to this many percent as noise.")
    ] = 3.0,
    as_json: JsonOption = False,
) -> None:
    """Compare two runs: what became slower or faster, which rows are missing, which bits changed.

    OLD and NEW are what `--out` wrote. Exits with 1 when a row is slower or takes more memory by
    more than the threshold, no longer has eager's bits, fails, or is missing; with 0 otherwise. Of
    ops the GPU time is compared, not the time of the CPU that launches them.
    """
    with _one_line("compare"):
        from .. import report as reports

        found = reports.compare(reports.read([old]), reports.read([new]), threshold)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
    else:
        _print(found)
    raise typer.Exit(1 if found.regressions else 0)


def _print(found: Comparison) -> None:
    console = Console()
    for note in found.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    if found.changes:
        table = Table(title=f"Changes over {found.threshold:g}%")
        for column in ("row", "what", "old", "new", "change"):
            table.add_column(column, justify="left" if column in ("row", "what") else "right")
        for c in found.changes[:SHOWN_CHANGES]:
            percent = "" if c.percent is None else f"{c.percent:+.1f}%"
            style = "red" if c.regression else "green"
            table.add_row(*map(Text, (c.row, c.what, c.old, c.new, percent)), style=style)
        console.print(table)
        left = len(found.changes) - SHOWN_CHANGES
        if left > 0:
            console.print(f"and {left} more; --json prints them all")
    same = found.rows - found.worse - found.better
    told = f"{found.rows} rows compared: {found.worse} worse, {found.better} better, "
    told += f"{same} within {found.threshold:g}%"
    told += f"; {found.lost} only in OLD" if found.lost else ""
    told += f"; {found.added} only in NEW" if found.added else ""
    console.print(told, highlight=False)


@contextmanager
def _one_line(command: str) -> Iterator[None]:
    """Print what is wrong with a file in one line, and exit with 1."""
    from ..errors import BadSetting
    from ..report.json_values import Unreadable
    from ..report.png import CannotDraw

    try:
        yield
    except (Unreadable, CannotDraw, BadSetting, OSError) as error:
        typer.echo(f"kernelwright {command}: {error}", err=True)
        raise typer.Exit(1) from None
