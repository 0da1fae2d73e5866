"""What a graph depends on beside its model: the inputs of a call, and the state of the process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...backends import torch_internals
from ...backends.torch_internals import pytree
from ...library_internals import collecting_outputs
from ..state.hooks import all_modules_hooked
from ..state.switches import switches
from .buffers import PLAIN_TYPES, TENSOR_TYPES, Refusal, alignment, is_no_container, is_simple


class Call:
    """The inputs of a call, taken apart. Calls with one key can share a graph."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], device_type: str) -> None:
        self._given = args, kwargs
        self.tensors: list[Tensor] = []
        marks = _mark(args, self.tensors), _mark(kwargs, self.tensors)
        devices = {t.device for t in self.tensors}
        if not devices:
            raise Refusal("no tensor among the inputs")
        # the value of a tensor on the CPU would become part of the graph
        if len(devices) > 1 or self.tensors[0].device.type != device_type:
            raise Refusal(f"inputs on {listed(devices)}")
        (self.device,) = devices
        self.key = (self.device, marks, switches(device_type))

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
        """The arguments, with other tensors in the place of these."""
        left = iter(tensors)
        leaves, structure = pytree.tree_flatten(self._given, is_leaf=is_no_container)
        leaves = [next(left) if isinstance(x, Tensor) else x for x in leaves]
        return pytree.tree_unflatten(leaves, structure)


def _mark(value: Any, tensors: list[Tensor]) -> tuple[Any, ...]:
    """What of an input a graph depends on: the layout of a tensor, the value of anything else, and
    the containers around them. Tensors are added to the list in the order of `pytree`, which this
    does the work of for the containers that most calls have."""
    kind = type(value)
    if kind in _TENSORS:
        if not is_simple(value):
            raise Refusal("an input that is sparse, conjugated or negated")
        tensors.append(value)
        return value.dtype, value.shape, value.stride(), alignment(value)
    if kind in _VALUES:
        return kind, value
    if kind is float or kind is complex:
        return kind, repr(value)  # 0.0 and -0.0 are equal
    if kind is dict:
        return dict, tuple(value), *[_mark(v, tensors) for v in value.values()]
    if kind is tuple or kind is list:
        return kind, *[_mark(v, tensors) for v in value]
    leaves, structure = pytree.tree_flatten(value, is_leaf=is_no_container)
    if structure.is_leaf():
        raise Refusal(f"an input of type {kind.__name__}")
    return structure, *[_mark(x, tensors) for x in leaves]


_TENSORS = frozenset(TENSOR_TYPES)
_VALUES = frozenset(PLAIN_TYPES) - {float, complex}


def check_surroundings() -> None:
    """Refuse where something looks on at every operation, which a replay would hide from it."""
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
    if all_modules_hooked():
        raise Refusal("a hook on all modules")
    if collecting_outputs():
        raise Refusal("inside a model that collects what its layers return")


def listed(devices: Iterable[torch.device]) -> str:
    return " and ".join(sorted(map(str, devices)))
