"""The forward of a whole model, while it runs in this thread.

What holds for a whole forward is found out once, when it begins: whether the modules are as they
were (`State`), and the switches of the process. Where nothing of others runs in between, every
module of the model relies on that; where hooks or unknown code do, each looks for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..state.hooks import base_layers, memory_of
from ..state.module_state import State
from ..state.switches import switches
from ..state.tensor_samples import Contents

_numbers = count(1)
NOTHING: frozenset[int] = frozenset()


@dataclass(eq=False)
class _Model:
    """A model in one state."""

    state: State
    memory: str | None  # why it must not be run twice
    modules: frozenset[int]
    adapted: set[int]
    serial: int = field(default_factory=_numbers.__next__)


class _Run(threading.local):
    """The model that is running in this thread."""

    token = 0  # the number of this forward; 0: none is running
    model: nn.Module | None = None
    on_gpu = False
    serial = 0  # the number of the model's state; 0: modules look for themselves
    memory: str | None = None
    modules: frozenset[int] = NOTHING  # ids of what that state is about
    adapted: frozenset[int] | set[int] = NOTHING  # ids of layers with an adapter around them
    switches: Any = None
    contents: Contents | None = None  # where to note what is kept beyond this forward


current = _Run()
_models: WeakKeyDictionary[nn.Module, list[_Model]] = WeakKeyDictionary()
# a person who turns something on and off comes back to a state
STATES = 4


@contextmanager
def begin(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], contents: Contents
) -> Iterator[None]:
    """While this lasts, `model` runs with these inputs."""
    if current.serial and id(model) in current.modules:  # a part of what is running
        yield
        return
    found = _model(model)
    before = vars(current).copy()
    current.token, current.model = next(_numbers), model
    current.memory, current.modules = found.memory, found.modules
    current.adapted, current.contents = found.adapted, contents
    current.serial = found.serial if found.memory is None else 0
    kind = device_type(args, kwargs)
    current.switches, current.on_gpu = switches(kind), kind == "cuda"
    try:
        yield
    finally:
        vars(current).clear()
        vars(current).update(before)


def is_first(model: nn.Module) -> bool:
    """Whether the forward that runs is that of `model`, and not of one around it."""
    return current.model is model


def looks_back() -> bool:
    """Whether the forward that runs finds out at its end what was written to before it, and then
    runs again. One with a memory cannot; nor is it worth waiting for the GPU at its beginning."""
    return current.token != 0 and (current.memory is None or not current.on_gpu)


def state_of(module: nn.Module) -> int:
    """The number of the running model's state, if that tells of `module` too."""
    return current.serial if id(module) in current.modules else 0


def device_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = (*args, *kwargs.values())
    return next((v.device.type for v in given if isinstance(v, Tensor)), "cpu")


def _model(model: nn.Module) -> _Model:
    known = _models.get(model, [])
    for found in known:
        if found.state.holds(model):
            return found
    modules = frozenset(map(id, model.modules()))
    found = _Model(State(model, adapters=False), memory_of(model), modules, base_layers(model))
    _models[model] = [found, *known[: STATES - 1]]
    return found
