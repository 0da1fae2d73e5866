"""What a graph depends on besides its model: the inputs of a call, and PyTorch's settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...backends import torch_internals
from ...backends.torch_internals import pytree
from ...library_internals import collecting_outputs
from ..state.switches import switches
from . import kv_caches
from .buffers import PLAIN_TYPES, TENSOR_TYPES, Refusal, alignment, is_leaf, is_simple


class Call:
    """The inputs of a call, flattened. Calls with equal keys can share a graph: a key is the layout
    of the inputs and PyTorch's switches, which are read when they are first asked for."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], device_type: str) -> None:
        self._given = args, kwargs
        self._device_type = device_type
        self.tensors: list[Tensor] = []
        self.caches: list[Any] = []  # of keys and values
        keys = tuple(_key_of(given, self.tensors, self.caches) for given in self._given)
        devices = {t.device for t in self.tensors}
        if not devices:
            raise Refusal("no tensor among the inputs")
        # the value of a CPU tensor would be baked into the graph
        if len(devices) > 1 or self.tensors[0].device.type != device_type:
            raise Refusal(f"inputs on {listed(devices)}")
        (self.device,) = devices
        self.layout = self.device, keys

    @cached_property
    def switches(self) -> tuple[Any, ...]:
        return switches(self._device_type)

    @property
    def key(self) -> tuple[Any, ...]:
        return self.layout, self.switches

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
        """The arguments, with these tensors in place of their own."""
        new = iter(tensors)
        leaves, structure = pytree.tree_flatten(self._given, is_leaf=is_leaf)
        leaves = [next(new) if isinstance(x, Tensor) else x for x in leaves]
        return pytree.tree_unflatten(leaves, structure)


def _key_of(value: Any, tensors: list[Tensor], caches: list[Any]) -> tuple[Any, ...]:
    """The layout of a tensor, the value of anything else, and the containers around them. Appends
    the tensors in pytree order, and the caches. Common containers are handled here: `pytree` is
    slower."""
    kind = type(value)
    if kind in _TENSORS:
        if not is_simple(value):
            raise Refusal("an input that is sparse, conjugated or negated")
        tensors.append(value)
        return value.dtype, value.shape, value.stride(), alignment(value)
    if kind in _VALUES:
        return kind, value
    if kind is float or kind is complex:
        return kind, repr(value)  # 0.0 == -0.0, but they may give other results
    if kind is dict:
        return dict, tuple(value), *[_key_of(v, tensors, caches) for v in value.values()]
    if kind is tuple or kind is list:
        return kind, *[_key_of(v, tensors, caches) for v in value]
    if (of_cache := kv_caches.key_of(value)) is not None:
        if any(value is cache for cache in caches):
            raise Refusal("a cache that is an input twice")
        caches.append(value)
        return of_cache
    leaves, structure = pytree.tree_flatten(value, is_leaf=is_leaf)
    if structure.is_leaf():
        raise Refusal(f"an input of type {kind.__name__}")
    return structure, *[_key_of(x, tensors, caches) for x in leaves]


_TENSORS = frozenset(TENSOR_TYPES)
_VALUES = frozenset(PLAIN_TYPES) - {float, complex}


def check_surroundings() -> None:
    """Refuse where something observes every operation: a replay would hide them from it."""
    if torch_internals.dispatch_modes():
        raise Refusal("inside a dispatch mode")
    if torch_internals.function_modes() and not torch_internals.only_default_devices():
        raise Refusal("inside a torch function mode")
    if torch_internals.in_functorch():
        raise Refusal("inside a function transform")
    if torch_internals.in_forward_ad():
        raise Refusal("forward-mode gradients are recorded")
    if torch.jit.is_tracing():
        raise Refusal("inside torch.jit.trace")
    if torch_internals.all_modules_hooked():
        raise Refusal("a hook on all modules")
    if collecting_outputs():
        raise Refusal("inside a model that collects what its layers return")


def listed(devices: Iterable[torch.device]) -> str:
    return " and ".join(sorted(map(str, devices)))
