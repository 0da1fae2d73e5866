"""The commands of a `bash` block: each must exist.

Commands of `kernelwright` run in this process. For `pip`, `make`, `git`, `python` and `kernels`
only the names in their arguments are checked.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from blocks import ROOT, Block, Wrong
from plugged import plugged
from typer.testing import CliRunner

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

COMMANDS = ("kernelwright", "pip", "make", "git", "python", "kernels")
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")


def bash(block: Block, folder: Path) -> None:
    """Run or check every command of a block, in `folder`."""
    with ExitStack() as installed:
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                _command(block, words, folder, installed)


def _command(block: Block, words: list[str], folder: Path, installed: ExitStack) -> None:
    given = {}
    while ASSIGNMENT.fullmatch(words[0]):
        name, _, given[name] = words.pop(0).partition("=")
    if stray := {"|", "||", "&&", "&", ";", ">", ">>", "<"} & set(words):
        raise Wrong(f"{block.name}: {sorted(stray)[0]} is not run here; give plain commands")
    head, *rest = words
    if head == "kernelwright":
        _kernelwright(block, rest, given, folder)
    elif head == "pip":
        _pip(block, rest, folder, installed)
    elif head == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        _known(block, "make target", [w for w in rest if "=" not in w], targets)
    elif head == "git":
        _known(block, "git command", rest[:1], _git_commands())
    elif head == "python":
        _script(block, rest)
    elif head == "kernels":
        _kernels(block, rest)
    else:
        raise Wrong(f"{block.name}: {head} is no command that is checked here")


def _kernelwright(block: Block, words: list[str], given: dict[str, str], folder: Path) -> None:
    from kernelwright.cli import app

    env = {"COLUMNS": "160", "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), **given}
    with mock.patch.dict(os.environ, env):
        result = CliRunner().invoke(app, words)
    if block.gpu and "its library is not built" in result.output:
        pytest.skip("the kernels compiled ahead of time are not built here")
    if result.exit_code and not (block.gpu and _is_slower_only(result.output)):
        raise Wrong(f"{block.name}: kernelwright {shlex.join(words)}: {result.output}") from (
            result.exception if isinstance(result.exception, Exception) else None
        )


def _is_slower_only(said: str) -> bool:
    """Whether `compare` found only changed times: other tests may use the same GPU."""
    return "rows compared" in said and not re.search(r"│ (bits|result|mismatches) ", said)


def _pip(block: Block, words: list[str], folder: Path, installed: ExitStack) -> None:
    """`pip install` of our extras, of a dependency, or of a local package."""
    if words[0] != "install":
        raise Wrong(f"{block.name}: pip {words[0]}, expected install")
    project = _project()
    listed = [project["dependencies"], *project["optional-dependencies"].values()]
    known = {re.split(r"[^\w-]", d)[0] for group in listed for d in group} | {"kernelwright"}
    for word in (w for w in words[1:] if not w.startswith("-")):
        wanted, _, address = word.partition(" @ ")  # a package in a git repository
        if address and not address.startswith("git+https://"):
            raise Wrong(f"{block.name}: {address} is no address of a git repository")
        name, _, extras = wanted.rstrip("]").partition("[")
        asked = [e.strip() for e in extras.split(",") if e]
        _known(block, "extra", asked, project["optional-dependencies"])
        if name.startswith("."):
            _install(block, name, folder, installed)
        else:
            _known(block, "dependency", [re.split(r"[<>=!~]", name)[0]], known)


def _install(block: Block, name: str, folder: Path, installed: ExitStack) -> None:
    """Install the op package that the block has created, as pip would."""
    if name == ".":
        return
    made = (folder / name).resolve()
    if not made.is_dir():
        if (
            not (ROOT / name / "pyproject.toml").exists()
            and not (ROOT / name / "setup.py").exists()
        ):
            raise Wrong(f"{block.name}: there is no package in {name}")
        return
    package = tomllib.loads((made / "pyproject.toml").read_text())["project"]["name"]
    installed.enter_context(plugged(SimpleNamespace(root=made, name=package.replace("-", "_"))))


def _script(block: Block, words: list[str]) -> None:
    """`python SCRIPT` in the checkout or next to the page; `python -m pytest PATH`."""
    if words[:2] == ["-m", "pytest"]:
        paths = [w for w in words[2:] if "/" in w]
    elif words[0].endswith(".py"):
        paths = words[:1]
    else:
        raise Wrong(f"{block.name}: python {words[0]}, expected a script")
    near = [ROOT, block.path.parent, *block.path.parent.parents]
    for path in paths:
        if not any((folder / path).exists() for folder in near if folder.is_relative_to(ROOT)):
            raise Wrong(f"{block.name}: there is no {path}")


def _kernels(block: Block, words: list[str]) -> None:
    from kernels import cli

    with (
        mock.patch("sys.argv", ["kernels", words[0], "--help"]),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        try:
            cli.main()
        except SystemExit as end:
            if end.code:
                raise Wrong(f"{block.name}: kernels {words[0]}: {said.getvalue()}") from None


def _known(block: Block, what: str, names: list[str], known: object) -> None:
    for name in names:
        if name not in known:  # type: ignore[operator]
            raise Wrong(f"{block.name}: there is no {what} {name!r}")


@cache
def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@cache
def _git_commands() -> set[str]:
    listed = ["git", "--list-cmds=main,others"]
    return set(subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split())
