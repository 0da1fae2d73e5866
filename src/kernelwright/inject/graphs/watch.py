"""What a captured graph takes for granted of its model, and whether it still holds."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import chain
from operator import is_, itemgetter
from typing import Any
from weakref import ref

from torch import Tensor, nn

from .call import OUTPUT_HOOKS
from .memory import TENSOR_TYPES

WEIGHT_TYPES = frozenset(TENSOR_TYPES)
# attributes of a module that change what a call of it does
PINNED = ("forward", "processor", "_hf_hook", "_compiled_call_impl")
# no block of a transformer has fewer weights than this
SAMPLED = 8
PLAIN = (bool, int, float, str, type(None), Enum)


class Watch:
    """A model as it was when this was made: its modules, weights, hooks and adapters.

    `same` is asked at every replay, so it walks flat lists that were laid out once, and leaves
    their loops to builtins. Nothing here holds on to the model itself: it may be freed.
    """

    def __init__(self, model: nn.Module) -> None:
        everything = list(model.modules())
        # a scripted module keeps its parts elsewhere
        modules = [m for m in everything if isinstance(m._modules, dict)]
        inner = [m for m in modules if m is not model]
        children = [m._modules for m in modules]
        tensors = [d for m in modules for d in (m._parameters, m._buffers)]
        hooks = [d for m in inner for d in _hooks(m)]
        self._empty = [d for d in (*children, *tensors, *hooks) if not d]
        self._hooked = [d for d in hooks if d]
        self._hook_ids = list(map(tuple, self._hooked))
        self._branches = [d for d in children if d]
        self._children = _values(self._branches)
        self._holders = [d for d in tensors if d]
        self._names = [vars(m) for m in inner]
        self._sizes = list(map(len, self._names))
        self._root_size = len(vars(model))
        self._pinned = [(n, name, n[name]) for n in self._names for name in PINNED if name in n]
        layers = _instances(inner, "peft.tuners.tuners_utils", "BaseTunerLayer")
        wrappers = _instances(inner, "peft.utils.other", "AuxiliaryTrainingWrapper")
        self._adapters = layers + wrappers
        self._adapter_states = [tuple(map(copy.copy, s)) for s in map(_state, self._adapters)]
        idle = _modes_without_effect(layers)
        self._modes = [vars(m) for m in inner if m not in idle]
        self._training = self._any_training()
        self._settings = [vars(o) for o in _settings(modules)]
        self._plain_settings = list(map(_plain, self._settings))
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
        """Whether the model is still what it was: modules, weights at their addresses, hooks,
        training mode, adapters, attention settings. Values written into weights do not count."""
        children = _values(self._branches)
        return (
            not any(self._empty)
            and list(map(tuple, self._hooked)) == self._hook_ids
            and len(vars(model)) == self._root_size
            and list(map(len, self._names)) == self._sizes
            and len(children) == len(self._children)
            and all(map(is_, children, self._children))
            and self._any_training() == self._training
            and _layout(self.weights()) == self._layout
            and all(n.get(name) is value for n, name, value in self._pinned)
            and list(map(_state, self._adapters)) == self._adapter_states
            and list(map(_plain, self._settings)) == self._plain_settings
        )

    def obstacle(self, model: nn.Module) -> str | None:
        """Why a model that is still the same cannot be captured."""
        return "training mode" if model.training else _hook_of(model) or self._obstacle

    def weights(self) -> list[Tensor]:
        """Every parameter and buffer, in the order of the modules."""
        return [t for t in _values(self._holders) if t is not None]

    def _any_training(self) -> bool:
        return any(map(itemgetter("training"), self._modes))

    def _find_obstacle(self, inner: list[nn.Module], weights: list[Tensor]) -> str | None:
        if self._training:
            return "training mode"
        if hook := next(filter(None, map(_hook_of, inner)), None):
            return hook
        for weight in weights:
            if type(weight) not in WEIGHT_TYPES:
                return f"weights of type {type(weight).__name__}"
        for layer in self._adapters:
            scales = (vars(layer).get("scaling") or {}).values()
            if any(isinstance(s, Tensor) and s.device.type == "cpu" for s in scales):
                return "an adapter scale that is a tensor on the CPU"
        return None


def _values(dicts: Iterable[dict]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _layout(weights: list[Tensor]) -> tuple[list, ...] | None:
    """Where the weights lie, or None if some are no plain tensors: those may have no address.
    The number of elements and the strides stand for the shape, which takes longer to ask for."""
    if not WEIGHT_TYPES.issuperset(map(type, weights)):
        return None
    return (
        list(map(Tensor.data_ptr, weights)),
        [w.dtype for w in weights],
        list(map(Tensor.numel, weights)),
        list(map(Tensor.stride, weights)),
    )


def _hooks(module: nn.Module) -> Iterator[dict]:
    yield module._forward_hooks
    yield module._forward_pre_hooks
    if (registry := vars(module).get("_diffusers_hook")) is not None:
        yield registry.hooks


def _hook_of(module: nn.Module) -> str | None:
    """A hook that does something around the call of a module, in words."""
    if not all(_collects_outputs(hook) for hooks in _hooks(module) for hook in hooks.values()):
        return f"a hook on {type(module).__name__}"
    if name := _moves_weights(vars(module).get("_hf_hook")):
        return f"{name} on {type(module).__name__}"
    return None


def _collects_outputs(hook: Any) -> bool:
    """Whether it is how a model of transformers comes by the hidden states it returns. They are
    results of the graph like any other."""
    return getattr(hook, "__module__", None) == OUTPUT_HOOKS


def _moves_weights(hook: Any) -> str | None:
    """The name of an accelerate hook, unless it only brings inputs to where the weights stay."""
    if hook is None:
        return None
    name = type(hook).__name__
    if name == "SequentialHook":
        return next(filter(None, map(_moves_weights, hook.hooks)), None)
    return None if name == "AlignDevicesHook" and not hook.offload else name


def _instances(modules: list[nn.Module], place: str, name: str) -> list[nn.Module]:
    """The modules of a class of another library, of which there are none before it is imported."""
    kind = getattr(sys.modules.get(place), name, None)
    return [] if kind is None else [m for m in modules if isinstance(m, kind)]


def _state(adapter: Any) -> tuple[Any, ...]:
    """What a module of peft reads from Python when it is called."""
    own = vars(adapter)
    return (
        own.get("scaling"),
        own.get("merged_adapters"),
        adapter._active_adapter,
        adapter._disable_adapters,
    )


def _modes_without_effect(layers: list[nn.Module]) -> set[nn.Module]:
    """Adapter modules whose training mode changes nothing. Loading an adapter into a model leaves
    its new modules in training mode, and only dropout among them cares."""
    found: set[nn.Module] = set()
    for layer in layers:
        added = (child for name, child in layer.named_children() if name != "base_layer")
        found.update((layer,), *(child.modules() for child in added))
    return {m for m in found if not isinstance(m, nn.modules.dropout._DropoutNd)}


def _settings(modules: list[nn.Module]) -> list[Any]:
    """Objects beside the modules that choose the attention: the processors of diffusers, and the
    configs of transformers."""
    found = {}
    for module in modules:
        config = vars(module).get("config")
        processor = vars(module).get("processor") or module._modules.get("processor")
        if hasattr(processor, "__dict__"):
            found[id(processor)] = processor
        if hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())


def _plain(names: dict[str, Any]) -> dict[str, Any]:
    """A copy of the entries that are plain values, or lists of them."""
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in names.items()
        if isinstance(value, PLAIN)
        or (isinstance(value, list) and all(isinstance(v, PLAIN) for v in value))
    }
