"""`kernelwright skill`: installs the agent skill where agents look for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import skill_eval
from .bench import JsonOption
from .command_line import CommandLine

app = CommandLine(
    help="The agent skill cuda-kernels: how an agent uses kernelwright and adds a kernel to it.",
)
app.add_typer(skill_eval.app, name="eval")


@app.command()
def add(
    claude: Annotated[bool, typer.Option("--claude", help="To .claude/skills.")] = False,
    codex: Annotated[bool, typer.Option("--codex", help="To .agents/skills.")] = False,
    opencode: Annotated[bool, typer.Option("--opencode", help="To .opencode/skills.")] = False,
    everywhere: Annotated[
        bool,
        typer.Option(
            "--global", "-g", help="In your home folder, for all projects, not in this folder."
        ),
    ] = False,
    dest: Annotated[
        Path | None, typer.Option(help="To this skills folder, for any other agent.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing copy.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy the skill, as the folder `cuda-kernels`, to where an agent looks for skills.

    Several agents may be named; without any it goes to `.agents/skills`, which Codex and OpenCode
    read. It comes from the installed package: it needs no network and matches your version.
    """
    from .. import skill
    from ..errors import CannotRun

    asked = {"claude": claude, "codex": codex, "opencode": opencode}
    agents = [agent for agent, wanted in asked.items() if wanted]
    if not agents and dest is None:
        agents = ["codex"]
    folders = [skill.skills_folder(agent, everywhere) for agent in agents]
    if dest is not None:
        folders.append(dest)
    places: list[Path] = []
    problems: list[str] = []
    for folder in folders:
        try:
            places.append(skill.add(folder, force))
        except CannotRun as error:
            problems.append(str(error))
    if as_json:
        typer.echo(json.dumps([str(place) for place in places], indent=2))
    else:
        for place in places:
            typer.echo(f"{place}: {len(skill.files())} files")
    for problem in problems:
        typer.echo(f"kernelwright skill add: {problem}", err=True)
    raise typer.Exit(1 if problems else 0)


@app.command("list")
def list_files(as_json: JsonOption = False) -> None:
    """List the files of the skill, what each is for, and the installed copies that agents find."""
    from .. import skill

    titles = {str(file): skill.title(file) for file in skill.files()}
    copies = skill.installed()
    if as_json:
        found = {"name": skill.NAME, "files": titles, "copies": [c.as_dict() for c in copies]}
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    shown = Table(title=skill.NAME)
    shown.add_column("file", no_wrap=True)
    shown.add_column("what it is")
    for file, title in titles.items():
        shown.add_row(file, title)
    console = Console()
    console.print(shown)
    for copy in copies:
        state = "this edition" if copy.state == "same" else "another edition: add it with --force"
        typer.echo(f"{copy.agent}: {copy.path} ({state})")
    if not copies:
        typer.echo("no agent finds a copy from here: kernelwright skill add")


@app.command()
def path() -> None:
    """Print the folder of the skill inside the installed package."""
    from .. import skill

    typer.echo(str(skill.FOLDER))
