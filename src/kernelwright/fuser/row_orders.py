"""The order in which ATen's ops sum a row, and how many threads share it then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..backends import Unsupported
from ..ops.row.order import Order, aten_order, eager_mean_order, layer_order, mean_order, rms_order
from .lowering import Statistics
from .recorded_ops import RMS_NORM

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class RowThreads:
    threads: int
    vector: int


def threads_of(
    statistics: list[Statistics], width: int, rows: int, exact: bool = True
) -> RowThreads | None:
    """How the threads share a row, which the order of its sums decides."""
    found: set[RowThreads] = set()
    for s in statistics:
        order = order_of(s, width, rows, exact)
        found.add(RowThreads(order.threads, order.vector))
    if len(found) > 1:
        raise Unsupported("sums of one row in different orders")
    return found.pop() if found else None


def order_of(s: Statistics, width: int, rows: int, exact: bool = True) -> Order:
    """ATen's order; if `exact`, that of the installed PyTorch."""
    room = 8
    if s.op in (aten.mean.dim, aten.sum.dim_IntList):  # which differ by a factor alone
        if s.dtype != torch.float32:
            raise Unsupported(f"{s.op} of {s.dtype}")
        return (eager_mean_order if exact else mean_order)(width, rows, room)
    if s.op is RMS_NORM:
        if not exact:
            return aten_order(width, "TorchRms", room)
        return rms_order(width, s.dtype.itemsize, room)
    if s.op is aten.native_layer_norm.default:
        return layer_order(width, room) if exact else aten_order(width, "TorchLayer", room)
    raise Unsupported(f"{s.op} has no order of summation here")


def scratch_name(norm: str) -> str:
    return "shared_" + "".join(c if c.isalnum() else "_" for c in norm)
