"""Whether comparing some values proves anything: zeros sum to zero in any order, and NaN is equal
to NaN."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# a tensor with a smaller share of non-zeros cannot distinguish summation orders
MIN_NONZERO = 1 / 16


def informative(*values: Any) -> bool:
    """Whether all of these tensors are finite and have enough non-zeros."""
    found = Uninformative()
    found.look_at("", values)
    return not found


class _Looked(NamedTuple):
    name: str
    numel: int
    nonzero: Tensor  # of no dimension
    total: Tensor


class Uninformative:
    """The names of sites that were compared on values that prove nothing. Values are looked at
    where they are; the host waits for the answers when it asks, once for all of them: a block has
    some forty sites, and the GPU would be idle after each."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._looked: list[_Looked] = []

    def add(self, name: str) -> None:
        self._names.add(name)

    def look_at(self, name: str, values: Iterable[Any]) -> None:
        """Add this name if one of these values proves nothing."""
        for t in values:
            if isinstance(t, Tensor) and t.is_floating_point() and t.numel():
                # Two reductions that allocate nothing of its size, as count_nonzero, isfinite and a
                # sum of 16-bit numbers in float64 do. If the sum is finite, so is each number.
                wide = torch.promote_types(t.dtype, torch.float32)
                nonzero = torch.linalg.vector_norm(t.detach(), 0, dtype=wide)
                total = t.detach().sum(dtype=wide)
                self._looked.append(_Looked(name, t.numel(), nonzero, total))

    def __bool__(self) -> bool:
        return bool(self._found())

    def __contains__(self, name: str) -> bool:
        return name in self._found()

    def _found(self) -> set[str]:
        alike = defaultdict(list)  # what can be read together
        for looked in self._looked:
            alike[type(looked.total), looked.total.device].append(looked)
        self._looked = []
        for group in alike.values():
            nonzeros = torch.stack([looked.nonzero for looked in group]).tolist()
            totals = torch.stack([looked.total for looked in group]).tolist()
            for looked, nonzero, total in zip(group, nonzeros, totals, strict=True):
                finite = total == total and abs(total) != float("inf")
                if not finite or nonzero < MIN_NONZERO * looked.numel:
                    self._names.add(looked.name)
        return self._names
