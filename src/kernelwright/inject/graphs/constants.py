"""Which tensors of a forward are made of no input: every replay of its graph makes them alike.

A tensor is constant if the op that made it read constant tensors only, or none: positions that a
model counts with arange are, what it computes from inputs or weights is not. Nor is memory that is
allocated empty: kernels that are launched without an op fill it. Numbers that Python reads from
other tensors could go anywhere, so that nothing is constant after that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...backends.torch_internals import pytree

VARYING = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape)
aten = torch.ops.aten
EMPTY = (
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted),
    *(aten.new_empty, aten.new_empty_strided),
)


class Enough(BaseException):
    """Raised to end a forward of which everything is known that was asked. Nothing may take it for
    a fault of the forward."""


class Constants(TorchDispatchMode):
    """Watches the ops of a forward."""

    def __init__(self) -> None:
        super().__init__()
        # by the address of a storage object, which this keeps alive
        self._known: dict[int, torch.UntypedStorage] = {}
        self._lost = False  # whether Python has read a number from a tensor that is not constant

    def has(self, tensors: Iterable[Tensor]) -> bool:
        return not self._lost and all(_key(t) in self._known for t in tensors)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        read = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        constant = self.has(read) and not any(tag in op.tags for tag in VARYING)
        constant &= op.overloadpacket not in EMPTY
        result = op(*args, **kwargs)
        made = pytree.tree_leaves(result)
        for t in made:
            if constant and isinstance(t, Tensor):
                self._known[_key(t)] = t.untyped_storage()
        if not constant:
            if op._schema.is_mutable:
                for t in read:
                    self._known.pop(_key(t), None)
            self._lost |= torch.Tag.dynamic_output_shape in op.tags
            self._lost |= any(_is_read_by_host(t, read) for t in made)
        return result


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_read_by_host(made: Any, read: list[Tensor]) -> bool:
    """Whether Python has, or may take, the values of what an op made of these."""
    if not isinstance(made, Tensor):
        return made is not None
    return made.device.type == "cpu" and any(t.device.type != "cpu" for t in read)
