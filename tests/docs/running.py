"""How a block is run.

A `python` block runs as a script, with small models in place of published ones (published.py), a
`bash` block command by command (commands.py). A `cuda` block is quoted from a kernel of the
library, and a `text` block is what a program printed. Any other language is an error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shutil
from pathlib import Path

from blocks import ROOT, Block, Wrong
from commands import COMMANDS, bash, tomllib
from published import small_pipelines

# folders of the checkout that commands read and write: a block gets a copy of those it names
COPIED = ("results", "hub")
# what a reader might want to run
RUNNABLE = (*COMMANDS, "$", ">>>", "import", "from")


def run(block: Block, folder: Path) -> None:
    """Execute a block in `folder`; raises if it fails."""
    runners = {
        "python": _python,
        "bash": bash,
        "cuda": _quoted,
        "json": _json,
        "toml": _toml,
        "text": _printed,
    }
    if block.language not in runners:
        known = ", ".join(runners)
        raise Wrong(f"{block.name}: language {block.language!r}, expected one of {known}")
    for name in COPIED:
        if f"{name}/" in block.text or f"{name} " in block.text:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("build"))
    before = Path.cwd()
    os.chdir(folder)
    try:
        runners[block.language](block, folder)
    finally:
        os.chdir(before)


def _printed(block: Block, folder: Path) -> None:
    """Nothing to run; raises if a line looks like a command."""
    for line in block.text.splitlines():
        if line.split(" ")[0] in RUNNABLE:
            raise Wrong(f"{block.name}: {line!r} is a command; commands stand in a bash block")


def _json(block: Block, folder: Path) -> None:
    json.loads(block.text)


def _toml(block: Block, folder: Path) -> None:
    tomllib.loads(block.text)


def _quoted(block: Block, folder: Path) -> None:
    if not is_quoted(block.text):
        raise Wrong(f"{block.name}: no kernel of the library has these lines")


def is_quoted(text: str) -> bool:
    """Whether these consecutive lines occur in a kernel of the library or a template."""
    wanted = _lines(text)
    kernels = [*(ROOT / "src").rglob("*.cuh*"), *(ROOT / "src").rglob("triton.py*")]
    found = (_lines(path.read_text(encoding="utf-8")) for path in kernels)
    return any(lines[n : n + len(wanted)] == wanted for lines in found for n in range(len(lines)))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _python(block: Block, folder: Path) -> None:
    """Run from a file, since Triton reads the source; line numbers match those of the page."""
    script = folder / f"{block.path.stem}_{block.line}.py"
    script.write_text("\n" * block.line + block.text)
    loads = small_pipelines() if ".from_pretrained(" in block.text else contextlib.nullcontext()
    with contextlib.redirect_stdout(io.StringIO()), loads:
        runpy.run_path(str(script), run_name="__main__")
