"""What a recipe says: which modules it matches, and what replaces their forward."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn

from ..identify.source import outline

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Patch:
    """A forward for the modules of one class.

    `target` is the full name of the class, or a function of a module that gives True, False, or
    why a module that looks like it is left alone. `forward(fusions)` makes the new forward, called
    with the module first; with `for_class` it is given the class as well. What it returns may be
    NotImplemented: the call then goes to the module's own forward. `covers` names the children
    whose work it takes over.

    `sources` are the functions it was written after, by their names in the module of the class;
    `written_for` are their fingerprints. Code of any other fingerprint has changed since: it is
    then checked in every tier, and left to torch.compile as it is.

    `not_exact` says why `exact` leaves these modules alone, if it does.
    """

    target: str | Callable[[nn.Module], bool | str]
    forward: Callable[..., Forward]
    does: str
    covers: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    written_for: tuple[str, ...] = ()
    for_class: bool = False
    not_exact: str | None = None

    def matches(self, module: nn.Module) -> bool | str:
        if callable(self.target):
            return self.target(module)
        return type(module) is class_of(self.target)

    def is_written_for(self, kind: type) -> bool:
        if self.sources and class_of(full_name(kind)) is not kind:
            return False  # a class that goes by the name of another
        return not self.sources or fingerprint(kind, self.sources) in self.written_for


# of a model: its blocks, in the order in which it calls them
Chain = Callable[[Any], Sequence[nn.Module]]


@dataclass(frozen=True)
class Recipe:
    """One model family. `chains` gives a chain by the full name of the class that runs the blocks,
    or is a function of a module that gives one or None: a block may then work ahead for the one
    that follows."""

    family: str
    patches: Sequence[Patch]
    chains: dict[str, Chain] | Callable[[nn.Module], Chain | None] = field(default_factory=dict)

    def chain(self, module: nn.Module) -> Chain | None:
        if callable(self.chains):
            return self.chains(module)
        return self.chains.get(full_name(type(module)))


def class_of(name: str) -> Any:
    """The class of a library by its full name, or None before that is imported."""
    place, _, last = name.rpartition(".")
    return getattr(sys.modules.get(place), last, None)


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@cache
def recipes() -> tuple[Recipe, ...]:
    """Every RECIPE in the folder `recipes`; the generic ones come last."""
    from .. import recipes as folder

    names = sorted(m.name for m in pkgutil.iter_modules(folder.__path__))
    names.sort(key=lambda n: n.startswith("generic"))
    return tuple(
        importlib.import_module(f".{name}", folder.__name__).RECIPE
        for name in names
        if not name.startswith("_")
    )


def fingerprint(kind: type, sources: tuple[str, ...]) -> str:
    """How these functions are written now; "" if one of them cannot be read."""
    functions = []
    for name in sources:
        found: Any = sys.modules[kind.__module__]
        for part in name.split("."):
            found = getattr(found, part, None)
        functions.append(found)
    return _fingerprint(tuple(functions))


@cache
def _fingerprint(functions: tuple[Any, ...]) -> str:
    outlines = list(map(outline, functions))
    return hashlib.sha256(repr(outlines).encode()).hexdigest()[:12] if all(outlines) else ""
