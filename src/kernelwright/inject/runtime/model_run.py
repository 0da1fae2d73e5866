"""The model whose forward is running in this thread.

Two things are checked once, when the forward begins: whether the modules are unchanged (`State`),
and PyTorch's switches. If no hooks or unknown code run in between, every module of the model relies
on that; otherwise each module checks its own state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..state.hooks import base_layers, why_run_once
from ..state.module_state import State
from ..state.switches import switches
from ..state.tensor_samples import TensorSamples
from .input_key import number_of

_numbers = count(1)
EMPTY: frozenset[int] = frozenset()


@dataclass(eq=False)
class _ModelState:
    """A model in one state."""

    state: State  # without what adapters read
    run_once: str | None  # why it must not run twice, or None if it may
    modules: frozenset[int]
    adapted: set[int]
    serial: int = field(default_factory=_numbers.__next__)
    # by the id of a module inside it: whether that may run twice
    repeatable: dict[int, bool] = field(default_factory=dict)
    whole: State | None = None  # with what adapters read; made when the model is trained
    whole_serial: int = 0
    looked: int = 0  # token of the forward in which `whole` was compared last

    def holds(self, model: nn.Module) -> bool:
        """Whether the model is still in this state."""
        if self.whole is not None and torch.is_grad_enabled() and self.whole.holds(model):
            self.looked = active.token
            return True
        return self.state.holds(model)

    def serial_with_adapters(self, model: nn.Module) -> int:
        """The serial of the model and of what its adapters read."""
        if self.looked != active.token:
            if self.whole is None or not self.whole.holds(model):
                self.whole, self.whole_serial = State(model), next(_numbers)
            self.looked = active.token
        return self.whole_serial


# The states that a model was seen in, of one injection: what a state describes may hold the model,
# and would keep it alive if anything but its own forwards held the state.
States = WeakKeyDictionary[nn.Module, list[_ModelState]]


class _Run(threading.local):
    """The model that is running in this thread. Its state is looked at when somebody first asks: a
    graph is replayed before, and the host compares while the GPU works."""

    token = 0  # identifies this forward; 0: none is running
    model: nn.Module | None = None
    on_gpu = False
    switches: int | None = None  # the number of PyTorch's switches
    states: States | None = None
    samples: TensorSamples | None = None  # of the tensors that cached values depend on
    at_end: list[Callable[[], None]] | None = None  # to be called when the forward has ended
    deferred: list[Any] | None = None  # comparisons that wait for it
    # of its state, which has no value in the class: see `__getattr__`
    serial: int  # identifies the state; 0: modules check their own
    run_once: str | None
    modules: frozenset[int]  # ids of the modules that the state covers
    adapted: frozenset[int] | set[int]  # ids of layers with an adapter around them
    repeatable: dict[int, bool] | None
    found: _ModelState | None

    def __getattr__(self, name: str) -> Any:
        if name not in OF_NO_MODEL:
            raise AttributeError(name)
        if self.model is None or self.states is None:
            return OF_NO_MODEL[name]
        found = _state(self.model, self.states)
        self.serial = found.serial if found.run_once is None else 0
        self.run_once, self.modules = found.run_once, found.modules
        self.adapted, self.repeatable = found.adapted, found.repeatable
        self.found = found
        return self.__dict__[name]


OF_NO_MODEL: dict[str, Any] = {
    "serial": 0,
    "run_once": None,
    "modules": EMPTY,
    "adapted": EMPTY,
    "repeatable": None,
    "found": None,
}
active = _Run()
# states kept per model: users who toggle a setting come back to an earlier one
MAX_STATES = 4


@contextmanager
def begin(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    samples: TensorSamples,
    states: States | None = None,
) -> Iterator[None]:
    """Make `model`, called with these inputs, the active one."""
    if active.model is not None and active.serial and id(model) in active.modules:
        yield  # part of the model that is active
        return
    kind = device_type(args, kwargs)
    outside = number_of(switches(kind))
    names = vars(active)
    before = names.copy()
    names.clear()
    active.token, active.model = next(_numbers), model
    active.samples, active.at_end = samples, []
    active.states = WeakKeyDictionary() if states is None else states
    active.switches, active.on_gpu = outside, kind == "cuda"
    at_end = active.at_end
    try:
        yield
    finally:
        names.clear()
        names.update(before)
        for end in at_end:
            end()


def is_outermost(model: nn.Module) -> bool:
    """Whether `model` itself is the active one, not a model around it."""
    return active.model is model


def checks_samples() -> bool:
    """Whether the running forward checks the samples that cached values depend on. On a GPU it does
    so at its end, and runs again if they changed. A stateful model must not run twice, and waiting
    for the GPU at the start would cost more than caching saves."""
    return active.token != 0 and (active.run_once is None or not active.on_gpu)


def state_of(module: nn.Module) -> int:
    """The serial of the active model's state if it covers `module`, else 0."""
    return active.serial if id(module) in active.modules else 0


def state_with_adapters(module: nn.Module) -> int:
    """The serial of the active model's state and of what its adapters read if it covers `module`,
    else 0."""
    serial, model = state_of(module), active.model
    if not serial or not active.adapted or active.found is None or model is None:
        return serial
    return active.found.serial_with_adapters(model)


def may_run_twice(module: nn.Module) -> bool:
    """Whether nothing in a module has state or side effects: no hooks, no code of an unknown
    library. For those of the active model this is found once for each of its states."""
    if active.serial:  # nothing in the whole model has
        return True
    if active.repeatable is None or id(module) not in active.modules:
        return why_run_once(module) is None
    known = active.repeatable.get(id(module))
    if known is None:
        known = active.repeatable[id(module)] = why_run_once(module) is None
    return known


def device_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = (*args, *kwargs.values())
    return next((v.device.type for v in given if isinstance(v, Tensor)), "cpu")


def _state(model: nn.Module, states: States) -> _ModelState:
    known = states.get(model, [])
    for found in known:
        if found.holds(model):
            return found
    modules = frozenset(map(id, model.modules()))
    state = State(model, adapters=False)
    found = _ModelState(state, why_run_once(model), modules, base_layers(model))
    states[model] = [found, *known[: MAX_STATES - 1]]
    return found
