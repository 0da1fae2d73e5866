"""Records of modules: one for each state that a module was seen in, with the verdicts on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import nn

from ..runtime import forwards
from ..state.hooks import base_layers, why_run_once
from ..state.module_state import State

_numbers = count(1)


@dataclass(frozen=True)
class Verdict:
    """Whether a module runs fused, and which sites stay eager, by module id: {site: why}."""

    fused: bool
    off: dict[int, dict[str, str]] = field(default_factory=dict)


@dataclass(eq=False)
class ModuleRecord:
    """A module in one state, and the verdicts on it."""

    state: State
    run_once: str | None  # why it must not run twice, or None if it may
    members: frozenset[int]  # ids of the injected modules in it, itself included
    unknown: bool  # whether some of its code is not what a recipe was written for
    same_strides: bool  # whether its result must have the strides of eager's
    excluded: dict[int, str]  # ids of modules in it that do not fit their recipe, and why
    adapted: set[int]  # ids of layers in it that are wrapped by an adapter
    parameters: list[dict[str, Any]]  # of the modules in it, as they hold them
    checked: int = 0  # serial of the model's state in which this one was last found unchanged
    serial: int = field(default_factory=_numbers.__next__)
    verdicts: dict[Any, Verdict] = field(default_factory=dict)
    # calls per signature that have given no verdict so far
    uninformative: Counter[Any] = field(default_factory=Counter)
    # signatures of inputs that have come at least once
    came: set[Any] = field(default_factory=set)
    # signatures at which a deferred comparison has found a difference
    differed: set[Any] = field(default_factory=set)
    # signatures with a cache at which the module does not run as programs
    declined: set[Any] = field(default_factory=set)

    @staticmethod
    def of(module: nn.Module, fused: Any) -> ModuleRecord:
        """The record of a module as it is now; `fused` is its new forward."""
        ours = [(module, fused), *_injected_in(module)]
        return ModuleRecord(
            State(module, adapters=False),
            why_run_once(module),
            frozenset(id(m) for m, _ in ours),
            any(not forward.known for _, forward in ours),
            fused.patch.same_strides,
            _mismatched(ours),
            base_layers(module),
            [m._parameters for m in module.modules() if m._parameters],
        )


def _injected_in(root: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """The injected modules inside a module, and their fused forwards. One whose forward others have
    wrapped is not among them: it checks its own state when it is called."""
    for module in root.modules():
        forward: Any = forwards.installed(module)
        fused = None if forward is None else getattr(forward.__func__, "fused", None)
        if fused is not None and module is not root:
            yield module, fused


def _mismatched(injected: list[tuple[nn.Module, Any]]) -> dict[int, str]:
    """The ids of injected modules that do not, or no longer, fit their recipe, and why."""
    found = {}
    for module, fused in injected:
        if forwards.class_forward(module, fused.own) is not fused.own:
            found[id(module)] = "its class has another forward now"
        elif fused.known and not fused.patch.is_written_for(type(module)):
            found[id(module)] = "its recipe was written for other code than it has now"
        elif (why := fused.patch.matches(module)) is not True:
            found[id(module)] = why or "it no longer fits its recipe"
    return found
