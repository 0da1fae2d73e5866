"""Launch choices of the CUDA row kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...backends import Unsupported
from ...backends.cuda import TYPES, CudaLaunch
from ..rows import vector_width
from .call import RowCall, check_fp8
from .order import Order, eager_mean_order, free_threads, layer_order, rms_order

if TYPE_CHECKING:
    from ..plan import Call

BITS = {"residual": 1, "gate": 2, "weight": 4, "bias": 8, "scale": 16, "shift": 32, "out_gate": 64}
NORMED, EIGHT = 128, 256
HELD = 512  # bytes of a row that a thread can hold
MODULATION = ("gate", "scale", "shift", "out_gate")


def plan(row: RowCall, call: Call) -> CudaLaunch:
    rows = row.rows()
    sizes, strides = rows.padded()
    places = [s for place in strides for s in place]
    width, dtype = row.width, row.x.dtype
    types = (dtype, row.dtype("weight", "bias"), row.dtype(*MODULATION))
    room = vector_width(width, dtype.itemsize, call.alignment, places)
    order = _order(row, call.exact, rows.count, room)
    vector = order.vector or min(room, 16 // max(t.itemsize for t in types))
    if vector > room:
        raise Unsupported(
            f"exact order needs rows that start on {vector * dtype.itemsize} bytes, "
            f"as PyTorch's vectorised kernel does"
        )
    threads = order.threads or free_threads(width, vector, row.norm != "none")
    block = max(128, threads)
    if row.eight[0]:
        check_fp8(call)
        if -(-width // (vector * threads)) * vector * dtype.itemsize > HELD:
            raise Unsupported(f"rows of {width} elements do not fit its registers")
    parts = sum(bit for part, bit in BITS.items() if row.has(part))
    parts |= (NORMED if row.has("y") else 0) | (EIGHT if row.eight[0] else 0)
    names = ", ".join(TYPES[t] for t in types)
    return CudaLaunch(
        source="ops/row/cuda.cuh",
        template=f"kernelwright::row<{names}, kernelwright::Spread<{width}, {vector}, {threads}>, "
        f"{block}, {len(rows.sizes)}, {parts}, kernelwright::{order.norm}, "
        f"kernelwright::{_rounding(row, call.exact, types)}>",
        arguments="kernelwright::RowArgs",
        grid=-(-rows.count // (block // threads)),
        block=block,
        pointers=(*row.pointers, *row.eight),
        layout="24q3I2f",
        scalars=(*places, rows.count, sizes[1], sizes[2], row.eps, order.factor),
        alignment=min(16, vector * dtype.itemsize),
    )


def _order(row: RowCall, chain: str | None, rows: int, room: int) -> Order:
    """The summation order: free, or that of the eager chain."""
    if row.norm == "none":
        return Order("NoNorm")
    if chain is None:
        return Order({"rms": "FreeRms", "layer": "FreeLayer"}[row.norm])
    if row.norm == "layer":
        if row.has("bias") and not row.has("weight"):
            # on H200, float32, some elements differed both with and without an fma
            raise Unsupported("F.layer_norm with a bias and no weight has no exact kernel")
        return layer_order(row.width, room)
    if row.has("bias"):
        raise Unsupported("an rms norm with bias has no exact kernel")
    if chain in ("diffusers", "transformers"):
        return eager_mean_order(row.width, rows, room)
    return rms_order(row.width, row.x.dtype.itemsize, room)


def _rounding(row: RowCall, chain: str | None, types: Sequence[torch.dtype]) -> str:
    """Where to round: once, or after every step of the eager chain."""
    if chain is None:
        return "Once"
    if chain == "wan":
        return "Each<float>"
    dtype, weight, modulation = types
    for part, other in (("weights", weight), ("modulation", modulation)):
        if other != dtype:
            raise Unsupported(f"eager would promote {dtype} rows by {other} {part}")
    return f"Each<{TYPES[dtype]}>"
