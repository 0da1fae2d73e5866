"""The order in which a row is summed, and how many threads share it then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..backends import Unsupported
from ..ops.row.order import (
    Order,
    eager_mean_order,
    free_threads,
    gradient_order,
    layer_order,
    rms_order,
)
from .lowering import Statistics
from .norms import NORM_GRADIENTS, RMS_NORMS, layer_norm_gradient, rms_norm_gradient

aten: Any = torch.ops.aten
SUMS = (aten.mean.dim, aten.sum.dim_IntList)  # which differ by a factor alone


@dataclass(frozen=True)
class Orders:
    """The orders of sums along rows of one width: those of the installed PyTorch, or, unless
    `exact`, free ones, in which a thread may hold vectors of `vector` elements."""

    width: int
    rows: int
    vector: int
    exact: bool

    def threads_of(self, statistics: list[Statistics]) -> tuple[int, int]:
        """How many threads share a row, and the width of their vectors."""
        found = {(order.threads, order.vector) for order in map(self.of, statistics)}
        if len(found) > 1:
            raise Unsupported("sums of one row in different orders")
        return found.pop()

    def of(self, s: Statistics) -> Order:
        order = self._aten(s) if self.exact else self._free(s)
        return replace(order, norm=order.norm.replace("MeanRms", "MeanSum"))

    def _free(self, s: Statistics) -> Order:
        names = {
            **dict.fromkeys((*SUMS, *NORM_GRADIENTS.values()), "FreeSum"),
            **dict.fromkeys(RMS_NORMS, "FreeRms"),
            aten.native_layer_norm.default: "FreeLayer",
        }
        if s.op not in names or s.dtype == torch.float64:
            raise Unsupported(f"{s.op} of {s.dtype}")
        return Order(names[s.op], free_threads(self.width, self.vector), self.vector)

    def _aten(self, s: Statistics) -> Order:
        room = 8
        if s.op in SUMS:
            if s.dtype != torch.float32:
                raise Unsupported(f"{s.op} of {s.dtype}")
            return eager_mean_order(self.width, self.rows, room)
        if s.op in RMS_NORMS:
            return rms_order(self.width, s.dtype.itemsize, room)
        if s.op is aten.native_layer_norm.default:
            return layer_order(self.width, room)
        if s.op is layer_norm_gradient or s.op is rms_norm_gradient:
            norm = "F.layer_norm" if s.op is layer_norm_gradient else "F.rms_norm"
            return gradient_order(norm, self.width, room)
        raise Unsupported(f"{s.op} has no order of summation here")

    def factor(self) -> float:
        """What a mean multiplies its sum by."""
        order = eager_mean_order(self.width, self.rows, self.vector) if self.exact else None
        return 1 / self.width if order is None else order.factor


def scratch_name(norm: str) -> str:
    return "shared_" + "".join(c if c.isalnum() else "_" for c in norm)
