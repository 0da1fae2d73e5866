"""The agent skill `cuda-kernels`: SKILL.md, its references and scripts, and their installation.

It is part of the package, so it describes the installed kernelwright, and adding it to a project
needs no network.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import CannotRun

NAME = "cuda-kernels"
FOLDER = Path(__file__).resolve().parent
# where agents look for skills, in a project or a home folder; Codex and OpenCode both read .agents
AGENTS = {"claude": ".claude/skills", "codex": ".agents/skills", "opencode": ".opencode/skills"}


@dataclass(frozen=True)
class Installed:
    """A copy of the skill. `state` is "same" if it equals this package's, "other" if not."""

    agent: str
    path: Path
    state: str

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def files() -> tuple[Path, ...]:
    """The files of the skill, relative to its folder; SKILL.md is first."""
    parts = (("references", "*.md"), ("scripts", "*.py"), ("scripts", "*.cuh"))
    found = [p for folder, kind in parts for p in sorted((FOLDER / folder).glob(kind))]
    return (Path("SKILL.md"), *(p.relative_to(FOLDER) for p in found))


def title(file: Path) -> str:
    """The title of a file: its first heading, or the first line of its docstring or comment."""
    lines = (FOLDER / file).read_text(encoding="utf-8").splitlines()
    mark = {".md": "# ", ".py": '"""', ".cuh": "// "}[file.suffix]
    return next(x.removeprefix(mark).removesuffix(mark) for x in lines if x.startswith(mark))


def skills_folder(agent: str, everywhere: bool = False) -> Path:
    """Where an agent looks: in this project, or with `everywhere` for all projects of a user."""
    if not everywhere:
        return Path(AGENTS[agent])
    if agent == "opencode":
        config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Path(config) / "opencode" / "skills"
    return Path.home() / AGENTS[agent]


def add(skills: Path, force: bool = False) -> Path:
    """Copy the skill into a skills folder; returns its folder there.

    Nothing is overwritten without `force`; with it an existing copy is replaced completely.
    """
    place = skills / NAME
    if place.is_symlink() or (place.exists() and not (place.is_dir() and _is_skill(place))):
        raise CannotRun(f"{place} exists and is not this skill: move it away first")
    if place.exists() and not force:
        raise CannotRun(f"{place} exists already: --force replaces it")
    try:
        skills.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=skills, prefix=f".{NAME}-") as made:
            new, old = Path(made) / "new", Path(made) / "old"
            for file in files():
                (new / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(FOLDER / file, new / file)
            if place.exists():
                place.rename(old)
            new.rename(place)
    except OSError as error:
        raise CannotRun(f"{skills} cannot be written ({error.strerror}): name another") from None
    return place


def installed(agents: Sequence[str] = tuple(AGENTS)) -> list[Installed]:
    """The copies that agents find: in this project, and in this user's home for all projects."""
    found = []
    for agent in agents:
        for everywhere in (False, True):
            place = skills_folder(agent, everywhere) / NAME
            if _is_skill(place):
                found.append(Installed(agent, place, "same" if _same(place) else "other"))
    return found


def _is_skill(place: Path) -> bool:
    """Whether a folder holds a skill of this name, in any version."""
    try:
        head = (place / "SKILL.md").read_text(encoding="utf-8")[:200]
    except (OSError, UnicodeDecodeError):
        return False
    return f"name: {NAME}\n" in head


def _same(place: Path) -> bool:
    there = {p.relative_to(place) for p in place.rglob("*") if p.suffix in (".md", ".py", ".cuh")}
    return there == set(files()) and all(
        (place / f).read_bytes() == (FOLDER / f).read_bytes() for f in files()
    )
