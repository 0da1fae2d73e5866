"""Checks the name of a new op."""

from __future__ import annotations

import builtins
import keyword
import re
from importlib.util import find_spec
from pathlib import Path

from ..ops.op import registry

# names of the files of an op's folder, and of what they import
PARTS = (
    "backward",
    "cases",
    "checks",
    "cuda",
    "folder_kernels",
    "op",
    "reference",
    "tests",
    "torch",
    "triton",
)
# a longer name makes lines of the files longer than 100 columns
MAX_LENGTH = 32


class BadName(ValueError):
    """An op cannot have this name; the message says why in one line."""


def check_name(name: str, ops: Path | None) -> None:
    """Raise BadName if an op cannot have this name: in the folder `ops`, or with None in a package
    of its own."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise BadName(
            f"{name!r} is not a name for an op: lower-case letters, digits and _, a letter first, "
            f"such as {_suggestion(name)!r}"
        )
    if len(name) > MAX_LENGTH:
        raise BadName(f"{name!r} has {len(name)} letters: choose a name of up to {MAX_LENGTH}")
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or hasattr(builtins, name):
        raise BadName(f"{name!r} is a word of Python: choose another name, such as '{name}_op'")
    if name in PARTS:
        raise BadName(f"{name!r} is the name of a part of every op: choose another")
    if name in registry():
        raise BadName(
            f"there is an op {name!r} already (kernelwright ops {name}): choose another name"
        )
    if _taken(name, ops):
        raise BadName(f"{name!r} is taken by a module of Python or kernelwright: choose another")


def _taken(name: str, ops: Path | None) -> bool:
    import kernelwright

    if hasattr(kernelwright, name) or find_spec(f"kernelwright.{name}") is not None:
        return True
    if ops is None:
        return find_spec(name) is not None
    return (ops / name).exists() or (ops / f"{name}.py").exists()


def _suggestion(name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    plain = re.sub(r"\W+", "_", words.lower(), flags=re.ASCII).strip("_")
    return plain if plain[:1].isalpha() else f"op_{plain}".rstrip("_")
