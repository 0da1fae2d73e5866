"""`kernelwright skill eval`: measures the skill with any agent, by requests with hidden tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..progress import steps_shown
from .command_line import CommandLine
from .one_line_errors import one_line_errors
from .shared_options import JsonOption

if TYPE_CHECKING:
    from ..skill.evaluation import Score

app = CommandLine(
    help="Measure the skill with an agent: ten requests for an op, with hidden tests.",
)
NameArgument = Annotated[str, typer.Argument(help="A request (`kernelwright skill eval list`).")]
LanguageOption = Annotated[
    str, typer.Option(help="The language to ask for: triton or cuda.", show_default=False)
]
# failures to print for each group
SHOWN = 3


@app.command("list")
def list_requests(as_json: JsonOption = False) -> None:
    """List the requests: what each asks for."""
    from ..skill import evaluation

    found = evaluation.REQUESTS.values()
    if as_json:
        listed = [{"name": r.name, "asks": r.asks, "backward": r.backward} for r in found]
        typer.echo(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    shown = Table("request", "asks for", "with backward")
    for request in found:
        shown.add_row(request.name, request.asks, "yes" if request.backward else "")
    Console().print(shown)


@app.command()
def prompt(name: NameArgument, language: LanguageOption) -> None:
    """Print what to give the agent, in a folder where `kernelwright skill add` has put the skill.

    The agent must not read the folder `skill/evaluation` of the package: the answers are there.
    """
    from ..skill import evaluation

    with one_line_errors("skill eval prompt"):
        text = evaluation.prompt(evaluation.find(name), _known(language))
    typer.echo(text, nl=False)


@app.command()
def score(
    name: NameArgument,
    language: LanguageOption,
    folder: Annotated[
        Path | None,
        typer.Option(help="The package that the agent made; by default what pip has installed."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the hidden tests on what the agent made, and print which hold; exits with 1 if not all.

    On a GPU the kernel runs there. Without one, Triton is interpreted and CUDA C++ is compiled by
    g++ and emulated thread by thread: formulas, masks, strides, layouts and gradients are seen;
    races, the GPU's own functions and speed are not, and the score says so.
    """
    from ..skill import evaluation

    with one_line_errors("skill eval score"):
        request = evaluation.find(name)
        known = _known(language)
        with steps_shown(Console(stderr=True), quiet=as_json) as show:
            show("compiling the kernel", 1)
            found = evaluation.score(request, known, folder, show=show)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2, ensure_ascii=False))
    else:
        _print(found)
    raise typer.Exit(0 if found.solved else 1)


def _known(language: str) -> str:
    from ..errors import BadSetting

    if language not in ("triton", "cuda"):
        raise BadSetting("--language", f"{language!r}, expected triton or cuda")
    return language


def _print(found: Score) -> None:
    shown = Table.grid(padding=(0, 2, 0, 0))
    for group in found.groups:
        good = group.held == group.total and not group.skipped
        text = Text(
            f"not run: {group.skipped}" if group.skipped else f"{group.held} of {group.total}",
            style="green" if good else "red",
        )
        for failure in group.failures[:SHOWN]:
            text.append(f"\n{failure}")
        if len(group.failures) > SHOWN:
            text.append(f"\nand {len(group.failures) - SHOWN} more")
        shown.add_row(Text(group.name, style="bold"), text)
    console = Console()
    console.print(Text(f"{found.request} in {found.language}", style="bold"), shown)
    console.print(f"the kernel ran {found.seen}")
    console.print(Text(found.verdict, style="bold green" if found.solved else "bold red"))
