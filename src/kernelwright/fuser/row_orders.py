"""The order in which ATen's ops sum a row, and how many threads share it then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..backends import Unsupported
from ..ops.row.order import mean_order, torch_order
from .lowering import Statistics
from .recording import RMS_NORM

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class RowThreads:
    threads: int
    vector: int


def threads_of(statistics: list[Statistics], width: int, rows: int) -> RowThreads | None:
    """How the threads share a row, which the order of its sums decides."""
    found: set[RowThreads] = set()
    for s in statistics:
        order = order_of(s, width, rows)
        found.add(RowThreads(order.threads, order.vector))
    if len(found) > 1:
        raise Unsupported("sums of one row in different orders")
    return found.pop() if found else None


def order_of(s: Statistics, width: int, rows: int) -> Any:
    room = 8
    if s.op in (aten.mean.dim, aten.sum.dim_IntList):  # which differ by a factor alone
        if s.dtype != torch.float32:
            raise Unsupported(f"{s.op} of {s.dtype}")
        return mean_order(width, rows, room)
    if s.op is RMS_NORM:
        return torch_order(width, "TorchRms", room)
    if s.op is aten.native_layer_norm.default:
        return torch_order(width, "TorchLayer", room)
    raise Unsupported(f"{s.op} has no order of summation here")


def scratch_name(norm: str) -> str:
    return "shared_" + "".join(c if c.isalnum() else "_" for c in norm)
