"""`only` and `skip`: which modules the user wants replaced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .targets import Part


class Selection:
    """Patterns are names of components, classes or modules, with * and ?. One that matches nothing
    is an error: a misspelt `skip` must not inject what was to be left alone."""

    def __init__(self, only: Any, skip: Any, parts: Sequence[Part]) -> None:
        self.only, self.skip = _patterns("only", only), _patterns("skip", skip)
        if self.only is None and not self.skip:
            return
        names = {
            name
            for part in parts
            for path, module in part.model.named_modules()
            for name in _names(part, path, module)
        }
        for pattern in (*(self.only or ()), *(self.skip or ())):
            if not any(fnmatchcase(name, pattern) for name in names):
                near = get_close_matches(pattern, names, 3)
                hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
                raise ValueError(f"no component, class or module is named {pattern!r}{hint}")

    def leaves_out(self, part: Part, path: str, module: nn.Module) -> str | None:
        """Why a module is not to be replaced, or None."""
        if self.only is not None and not _matches(self.only, part, path, module):
            return "not named by only"
        if self.skip and _matches(self.skip, part, path, module):
            return "named by skip"
        return None


def _patterns(argument: str, given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if isinstance(given, str):
        return (given,)
    patterns = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"{argument} is {given!r}, expected a name or several names")
    return patterns


def _names(part: Part, path: str, module: nn.Module) -> tuple[str, ...]:
    return tuple(n for n in (part.name, path, part.path(path), type(module).__name__) if n)


def _matches(patterns: tuple[str, ...], part: Part, path: str, module: nn.Module) -> bool:
    """Match its own name, its class, its component, or the name of a module that contains it."""
    steps = path.split(".")
    above = [".".join(steps[: i + 1]) for i in range(len(steps))] if path else []
    names = {*_names(part, path, module), *above, *(part.path(a) for a in above)}
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)
