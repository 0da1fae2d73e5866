"""A recipe: which modules it matches, and what replaces their forward."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn

from ..identify.source import fingerprint_alone

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Patch:
    """A forward for the modules of one class.

    `target` is the full name of the class, or a function that is given a module and returns True,
    False, or why a module that looks like a match is left alone. `forward(fusions)` returns the new
    forward, whose first argument is the module; with `for_class` it is given the class as well. If
    the new forward returns NotImplemented, the module's own forward runs. `covers` names the
    children whose work it takes over.

    `sources` are the functions it was written for, by their names in the Python module of the
    class; `written_for` are their fingerprints. Code with another fingerprint has changed since:
    every tier then checks the new forward, and torch.compile is given the module's own.

    `not_exact` is why `exact` leaves these modules alone, or None. `signature` returns the key of a
    call's inputs under which verdicts are kept, where the usual one says too little. `programs_for`
    is given the arguments of a call and returns whether the fuser's programs are faster for it;
    `leaves_parts` is given a block and returns whether programs are faster for all calls, because
    the forward leaves much of the block as it is. It then serves calls that cannot be recorded.
    With `same_strides` results must have the strides of eager's: what the model does with them is
    not known.
    """

    target: str | Callable[[nn.Module], bool | str]
    forward: Callable[..., Forward]
    does: str
    covers: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    written_for: tuple[str, ...] = ()
    for_class: bool = False
    not_exact: str | None = None
    signature: Callable[[Any, Any], Any] | None = None
    programs_for: Callable[[Any, Any], bool] | None = None
    leaves_parts: Callable[[nn.Module], bool] = lambda block: False
    same_strides: bool = False

    def matches(self, module: nn.Module) -> bool | str:
        if callable(self.target):
            return self.target(module)
        return self.may_match(type(module))

    def may_match(self, kind: type) -> bool:
        """Whether it matches modules of a class, or the modules have to be asked."""
        return callable(self.target) or kind is class_of(self.target)

    def is_written_for(self, kind: type) -> bool:
        if self.sources and class_of(full_name(kind)) is not kind:
            return False  # another class of the same name
        return not self.sources or sources_fingerprint(kind, self.sources) in self.written_for


# returns the blocks of a model in the order in which it calls them
Chain = Callable[[Any], Sequence[nn.Module]]


@dataclass(frozen=True)
class Recipe:
    """One model family, or modules of any model (`generic`). `chains` are the chains by the full
    name of the class that runs the blocks, or a function that returns the chain of a module or
    None. In a chain, a block may work ahead for the next."""

    family: str
    patches: Sequence[Patch]
    chains: dict[str, Chain] | Callable[[nn.Module], Chain | None] = field(default_factory=dict)
    generic: bool = False

    def chain(self, module: nn.Module) -> Chain | None:
        if callable(self.chains):
            return self.chains(module)
        return self.chains.get(full_name(type(module)))


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    """An argument of a call, given by place or by name; None if it is not given."""
    return args[place] if place < len(args) else kwargs.get(name)


def class_of(name: str) -> Any:
    """A class of a library by its full name; None if it is not imported."""
    module, _, last = name.rpartition(".")
    return getattr(sys.modules.get(module), last, None)


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


def sources_fingerprint(kind: type, sources: tuple[str, ...]) -> str:
    """The fingerprint of these functions as they are now; "" if the source of one is missing."""
    functions = []
    for name in sources:
        found: Any = sys.modules[kind.__module__]
        for part in name.split("."):
            found = getattr(found, part, None)
        functions.append(found)
    return fingerprint_alone(tuple(functions))
