"""What a captured graph assumes about its model, and whether that still holds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any
from weakref import ref

from torch import Tensor, nn

from ...backends.torch_internals import DROPOUT
from ...library_internals import (
    accelerate_moves_weights,
    collects_outputs,
    peft_children,
    peft_layers,
    peft_scales,
)
from ..runtime import model_run
from ..state.hooks import effect_of, hooks_of
from ..state.module_state import State
from ..state.weights_at_rest import is_at_rest
from .buffers import TENSOR_TYPES

WEIGHT_TYPES = frozenset(TENSOR_TYPES)
# `in_place` looks at one weight in so many; no block of a transformer has fewer
SAMPLED = 8


class Assumptions:
    """The state of a model and the addresses of its weights, when this was made.

    `same` runs at every replay, so it walks flat lists that were built once, with builtins for
    loops. There is no strong reference to the model itself: it may be freed.
    """

    def __init__(self, model: nn.Module) -> None:
        everything = list(model.modules())
        # the _modules of a scripted module is no dict
        modules = [m for m in everything if isinstance(m._modules, dict)]
        inner = [m for m in modules if m is not model]
        self._state = State(model)
        self._held_with = 0  # the serial of the state of the model around this one
        self._holders = [d for m in modules for d in (m._parameters, m._buffers) if d]
        self._adapters = peft_layers(inner)
        self._scales = _scales(self._adapters)
        ignored = _training_without_effect(self._adapters)
        self._training = any(m.training for m in inner if m not in ignored)
        weights = self.weights()
        self._layout = _layout(weights)
        self._watch_storages(weights)
        named = [(d, n) for d in self._holders for n, t in d.items() if t is not None]
        self._sample = named[::SAMPLED]
        plain = weights if self._layout is not None else []
        resting = {id(w) for w in plain if is_at_rest(w)}
        self.devices = frozenset(w.device for w in weights if id(w) not in resting)
        scripted = len(modules) < len(everything)
        self._obstacle = "scripted modules" if scripted else self._find_obstacle(inner, weights)

    def in_place(self) -> bool:
        """Whether the weights still own their memory, so that a replay may read it. This runs
        before a replay, `same` during it.

        A weight that is moved, rebound or swapped leaves its storage; if nothing else refers to the
        storage it is freed, and a weak reference reports that. A storage may also be resized in
        place. That happens to a whole model or block, so one weight in SAMPLED shows it.
        """
        if self._layout is None:
            return False
        if self._freed:
            weights = self.weights()
            if _layout(weights) != self._layout:
                return False
            self._watch_storages(weights)  # they moved away and back
        found: list[Any] = [holder.get(name) for holder, name in self._sample]
        return (
            WEIGHT_TYPES.issuperset(map(type, found))
            and list(map(Tensor.data_ptr, found)) == self._layout[0][::SAMPLED]
        )

    def _watch_storages(self, weights: list[Tensor]) -> None:
        """Add to `_freed` whenever a storage of the weights is freed."""
        self._freed: list[Any] = []
        plain = weights if self._layout is not None else []
        storages = {id(s): s for s in map(Tensor.untyped_storage, plain)}
        self._storages = [ref(s, self._freed.append) for s in storages.values()]

    def same(self, model: nn.Module) -> bool:
        """Whether the model is unchanged: modules, hooks, attributes, processors, adapters and the
        addresses of weights. The values of weights may change."""
        # inside another model, whose state covers this one and was checked when its forward began;
        # it leaves out what adapters read
        serial = 0 if self._adapters else model_run.state_of(model)
        if not serial or serial != self._held_with:
            if not self._state.holds(model):
                return False
            self._held_with = serial
        return _layout(self.weights()) == self._layout and _scales(self._adapters) == self._scales

    def obstacle(self, model: nn.Module) -> str | None:
        """Why an unchanged model cannot be captured, or None."""
        return "training mode" if model.training else _hook_of(model) or self._obstacle

    def weights(self) -> list[Tensor]:
        """Every parameter and buffer, in the order of the modules."""
        return [t for t in _values(self._holders) if t is not None]

    def _find_obstacle(self, inner: list[nn.Module], weights: list[Tensor]) -> str | None:
        if self._training:
            return "training mode"
        if hook := next(filter(None, map(_hook_of, inner)), None):
            return hook
        if effect := next(filter(None, map(effect_of, inner)), None):
            return effect
        for weight in weights:
            if type(weight) not in WEIGHT_TYPES:
                return f"weights of type {type(weight).__name__}"
        return "weights without an address" if self._layout is None else None


def _values(dicts: Iterable[dict]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _layout(weights: list[Tensor]) -> tuple[list, ...] | None:
    """Addresses and layouts of the weights, or None if some have no address: subclasses of Tensor,
    and what accelerate's offload leaves behind after it ran inside a transform of torch.func.
    Number of elements and strides stand for the shape, which is slower to read."""
    if not WEIGHT_TYPES.issuperset(map(type, weights)):
        return None
    try:
        addresses = list(map(Tensor.data_ptr, weights))
    except RuntimeError:
        return None
    return (
        addresses,
        [w.dtype for w in weights],
        list(map(Tensor.numel, weights)),
        list(map(Tensor.stride, weights)),
    )


def _hook_of(module: nn.Module) -> str | None:
    """The hook on a module that a replay would skip, in words, or None."""
    # hidden states that a transformers model collects by hooks are ordinary results of the graph
    if not all(collects_outputs(hook) for hooks in hooks_of(module) for hook in hooks.values()):
        return f"a hook on {type(module).__name__}"
    if name := accelerate_moves_weights(module):
        return f"{name} on {type(module).__name__}"
    return None


def _scales(adapters: list[nn.Module]) -> list[float]:
    """Scales of adapters that are CPU tensors, as peft has them for hot-swapping: a capture bakes
    their values in."""
    scales = (s for a in adapters for s in peft_scales(a))
    return [float(s) for s in scales if isinstance(s, Tensor) and s.device.type == "cpu"]


def _training_without_effect(layers: list[nn.Module]) -> set[nn.Module]:
    """Adapter modules that compute the same in training mode: all but dropout. peft leaves the
    modules of a newly loaded adapter in training mode."""
    found: set[nn.Module] = set()
    for layer in layers:
        found.update((layer,), *(child.modules() for child in peft_children(layer)))
    return {m for m in found if not isinstance(m, DROPOUT)}
