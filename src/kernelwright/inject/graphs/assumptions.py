"""What a captured graph takes for granted of its model, and whether it still holds."""

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
from ..state.hooks import effect_of, hooks_of
from ..state.module_state import State
from .buffers import TENSOR_TYPES

WEIGHT_TYPES = frozenset(TENSOR_TYPES)
# no block of a transformer has fewer weights than this
SAMPLED = 8


class Watch:
    """A model as it was when this was made: its state, and where its weights lie.

    `same` is asked at every replay, so it walks flat lists that were laid out once, and leaves
    their loops to builtins. Nothing here holds on to the model itself: it may be freed.
    """

    def __init__(self, model: nn.Module) -> None:
        everything = list(model.modules())
        # a scripted module keeps its parts elsewhere
        modules = [m for m in everything if isinstance(m._modules, dict)]
        inner = [m for m in modules if m is not model]
        self._state = State(model)
        self._holders = [d for m in modules for d in (m._parameters, m._buffers) if d]
        self._adapters = peft_layers(inner)
        self._scales = _scales(self._adapters)
        idle = _modes_without_effect(self._adapters)
        self._training = any(m.training for m in inner if m not in idle)
        weights = self.weights()
        self._layout = _layout(weights)
        self._listen(weights)
        places = [(d, n) for d in self._holders for n, t in d.items() if t is not None]
        self._sample = places[::SAMPLED]
        self.devices = frozenset(w.device for w in weights)
        scripted = len(modules) < len(everything)
        self._obstacle = "scripted modules" if scripted else self._find_obstacle(inner, weights)

    def in_place(self) -> bool:
        """Whether the memory of the weights is theirs still, so that a replay may read it. This is
        asked before a replay, `same` while it runs.

        Weights that were moved, rebound or swapped leave a storage behind; if nobody else has it,
        it dies, which is heard of when it happens. A storage that lives may have been resized where
        it is. That is done to a whole model or block, so one weight in SAMPLED shows it.
        """
        if self._layout is None:
            return False
        if self._freed:
            weights = self.weights()
            if _layout(weights) != self._layout:
                return False
            self._listen(weights)  # they went and came back to where they were
        found: list[Any] = [holder.get(name) for holder, name in self._sample]
        return (
            WEIGHT_TYPES.issuperset(map(type, found))
            and list(map(Tensor.data_ptr, found)) == self._layout[0][::SAMPLED]
        )

    def _listen(self, weights: list[Tensor]) -> None:
        """Have `_freed` fill up when a storage of the weights dies."""
        self._freed: list[Any] = []
        plain = weights if self._layout is not None else []
        storages = {id(s): s for s in map(Tensor.untyped_storage, plain)}
        self._storages = [ref(s, self._freed.append) for s in storages.values()]

    def same(self, model: nn.Module) -> bool:
        """Whether the model is still what it was: modules, hooks, attributes, processors, adapters,
        weights at their addresses. Values written into weights do not count."""
        return (
            self._state.holds(model)
            and _layout(self.weights()) == self._layout
            and _scales(self._adapters) == self._scales
        )

    def obstacle(self, model: nn.Module) -> str | None:
        """Why a model that is still the same cannot be captured."""
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
    """Where the weights lie, or None if some have no address: subclasses of Tensor, and what
    accelerate's offload leaves behind after it ran inside a transform of torch.func.
    The number of elements and the strides stand for the shape, which takes longer to ask for."""
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
    """A hook that does something around the call of a module, in words."""
    # hidden states that a model of transformers collects are results of the graph like any other
    if not all(collects_outputs(hook) for hooks in hooks_of(module) for hook in hooks.values()):
        return f"a hook on {type(module).__name__}"
    if name := accelerate_moves_weights(module):
        return f"{name} on {type(module).__name__}"
    return None


def _scales(adapters: list[nn.Module]) -> list[float]:
    """Scales of adapters that are tensors on the CPU, as peft has them for hot-swapping: a capture
    reads their values."""
    scales = (s for a in adapters for s in peft_scales(a))
    return [float(s) for s in scales if isinstance(s, Tensor) and s.device.type == "cpu"]


def _modes_without_effect(layers: list[nn.Module]) -> set[nn.Module]:
    """Adapter modules whose training mode changes nothing. Loading an adapter into a model leaves
    its new modules in training mode, and only dropout among them cares."""
    found: set[nn.Module] = set()
    for layer in layers:
        found.update((layer,), *(child.modules() for child in peft_children(layer)))
    return {m for m in found if not isinstance(m, DROPOUT)}
