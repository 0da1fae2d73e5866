"""What is known of one module: the states it was seen in, and the verdicts on each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import nn

from ..runtime import forwards
from ..state.hooks import base_layers, memory_of
from ..state.module_state import State

_numbers = count(1)


@dataclass(frozen=True)
class Verdict:
    """Whether a module runs fused, and which sites in it and below it do not."""

    fused: bool
    off: dict[int, dict[str, str]] = field(default_factory=dict)


@dataclass(eq=False)
class ModuleRecord:
    """A module in one state, and the verdicts on it."""

    state: State
    once: str | None  # why it must not be run twice
    members: frozenset[int]  # injected modules that it is about: it and those in it, by id
    unknown: bool  # whether some of its code is not what a recipe was written for
    stays: dict[int, str]  # modules in it that are not what their recipe is for, by id
    adapted: set[int]  # layers in it with an adapter around them, by id
    checked: int = 0  # the state of the whole model in which this one was last found unchanged
    serial: int = field(default_factory=_numbers.__next__)
    verdicts: dict[Any, Verdict] = field(default_factory=dict)
    # how often a signature came with nothing but zeros or NaN
    untold: Counter[Any] = field(default_factory=Counter)

    @staticmethod
    def of(module: nn.Module, fused: Any) -> ModuleRecord:
        """A module as it is now, whose new forward is `fused`."""
        ours = [(module, fused), *_injected_in(module)]
        return ModuleRecord(
            State(module, adapters=False),
            memory_of(module),
            frozenset(id(m) for m, _ in ours),
            any(not forward.known for _, forward in ours),
            _strangers(ours),
            base_layers(module),
        )


def _injected_in(root: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """The injected modules inside a module, and their fused forwards. One whose forward somebody
    has wrapped is not among them: it checks its own state when it is called."""
    for module in root.modules():
        forward: Any = forwards.current(module)
        fused = None if forward is None else getattr(forward.__func__, "fused", None)
        if fused is not None and module is not root:
            yield module, fused


def _strangers(injected: list[tuple[nn.Module, Any]]) -> dict[int, str]:
    """Injected modules that are not, or no longer, what their recipe is for, by id, and why."""
    found = {}
    for module, fused in injected:
        if forwards.class_forward(module, fused.own) is not fused.own:
            found[id(module)] = "its class has another forward now"
        elif fused.known and not fused.patch.is_written_for(type(module)):
            found[id(module)] = "the code that its recipe was written after was replaced"
        elif (why := fused.patch.matches(module)) is not True:
            found[id(module)] = why or "it is no longer what its recipe is for"
    return found
