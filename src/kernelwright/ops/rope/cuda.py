"""Launch choices of the CUDA rotary kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ...backends import Unsupported
from ...backends.cuda import TYPES, CudaLaunch
from ..row.cuda import free_threads, mean_threads, played_threads
from ..rows import Rows, vector_width
from .kernel import RopeCall

if TYPE_CHECKING:
    from ..op import Call

# shared memory of a block holds the rows it exchanges halves of
MAX_EXCHANGE = 12288
EMPTY = Rows((0,), ((0,), None, None, (0,)))


def plan(rope: RopeCall, call: Call) -> CudaLaunch:
    q_rows, k_rows = rope.rows("query"), rope.rows("key")
    assert q_rows is not None
    both = (q_rows, k_rows or EMPTY)
    dims = max(len(r.sizes) for r in both)
    padded = [r.padded() for r in both]
    (q_sizes, q_strides), (k_sizes, k_strides) = padded
    width, dtype, itemsize = rope.width, rope.query.dtype, rope.query.dtype.itemsize
    table = rope.dtype("cos", "sin") if rope.rotates else torch.float32
    norm, rounding, turn, threads, vector, factors = _policies(rope, call.exact, both)
    strides = [s for pair in zip(q_strides, k_strides, strict=True) for place in pair for s in place]
    # what one access may move, and what a thread holds: pairs must not be torn apart
    moved = vector_width(width, itemsize, call.alignment, strides)
    rotated = rope.rotation // 2 if rope.layout == "half" else rope.rotation
    moved = vector_width(rotated, itemsize, moved * itemsize, ()) if rope.rotates else moved
    if vector == 0:
        # by the widest operand: a float32 vector of 8 would be two half-used accesses
        widest = max(itemsize, table.itemsize // (2 if rope.half_table else 1))
        vector = max(2, min(moved, 16 // widest))
        while vector > 2 and rotated % vector:
            vector //= 2
        threads = free_threads(width, vector)
    if width % vector or (rope.rotates and rotated % vector):
        raise Unsupported(f"rows of {width} with rotations of {rope.rotation} cannot be vectorised")
    if call.exact and rope.norm and vector > moved:
        raise Unsupported("exact order needs rows aligned as PyTorch's vectorised kernel does")
    block = max(128, threads)
    each = rows_each(rope, both, vector, threads)
    if rope.layout == "half" and rope.rotates and block // threads * each * width > MAX_EXCHANGE:
        raise Unsupported(f"rows of {width} are too wide to exchange halves")
    q_blocks, k_blocks = (-(-r.count // (block // threads * each)) for r in both)
    layout = {"interleaved": "INTERLEAVED", "half": "HALF"}[rope.layout]
    weighted = rope.tensors["q_weight"] is not None
    if weighted != (rope.tensors["k_weight"] is not None) and k_rows is not None:
        raise Unsupported("query and key need a weight each, or neither")
    types = ", ".join(TYPES[t] for t in (dtype, rope.dtype("q_weight", "k_weight"), table))
    shape = f"kernelwright::Spread<{width}, {vector}, {threads}>"
    return CudaLaunch(
        source="ops/rope/cuda.cuh",
        template=f"kernelwright::rope<{types}, {shape}, {each}, {min(moved, vector)}, {block}, {dims}, "
        f"{rope.rotation}, kernelwright::{layout if rope.rotates else 'UNROTATED'}, "
        f"{str(rope.half_table).lower()}, {str(weighted).lower()}, kernelwright::{norm}, "
        f"kernelwright::{rounding}, kernelwright::{turn}>",
        arguments="kernelwright::RopeArgs",
        grid=q_blocks + k_blocks,
        block=block,
        pointers=rope.pointers,
        layout="24q8I3f",
        scalars=(
            *strides,
            q_rows.count,
            *q_sizes[1:],
            both[1].count,
            *k_sizes[1:],
            q_blocks,
            q_blocks // k_blocks if k_blocks and q_blocks % k_blocks == 0 else 0,
            rope.eps,
            *factors,
        ),
        alignment=min(16, moved * itemsize),
    )


def rows_each(rope: RopeCall, rows: tuple[Rows, Rows], vector: int, threads: int) -> int:
    """Rows a thread group takes: those that share a table line, while registers last."""
    if not rope.rotates or rows[0].count < 8192:
        return 1
    held = -(-rope.width // (vector * threads)) * vector
    for each in (4, 2):
        if each * held <= 32 and all(r.sizes[-1] % each == 0 for r in rows):
            return each
    return 1


def _policies(
    rope: RopeCall, chain: str | None, rows: tuple[Rows, Rows]
) -> tuple[str, str, str, int, int, tuple[float, float]]:
    """Norm, its rounding, the rotation's rounding, threads, vector, mean factors."""
    dtype, width = rope.query.dtype, rope.width
    if chain is None:
        return ("FreeRms" if rope.norm else "NoNorm"), "Once", "Once", 0, 0, (0.0, 0.0)
    table = rope.dtype("cos", "sin") if rope.rotates else dtype
    step = torch.float32 if chain == "diffusers" else torch.promote_types(dtype, table)
    if chain == "transformers" and step != dtype:
        raise Unsupported(f"eager would promote {dtype} rows by {table} tables")
    turn = f"Each<{TYPES[step]}>"
    if not rope.norm:
        return "NoNorm", "Once", turn, 0, 0, (0.0, 0.0)
    if rope.dtype("q_weight", "k_weight") != dtype:
        raise Unsupported("eager would promote the rows by their weights")
    rounding = f"Each<{TYPES[dtype]}>"
    if chain == "transformers":
        orders = {mean_threads(width, r.count) for r in rows if r.count}
        if len(orders) > 1:
            raise Unsupported("at::mean sums so few query and key rows in different orders")
        threads, vector, norm = orders.pop()
        if vector == 1 and rope.rotates and rope.layout == "interleaved":
            raise Unsupported(f"at::mean reads rows of {width} one element at a time, pairs are two")
        factors = tuple(
            float(np.float32(r.count) / np.float32(max(1, r.count * width))) for r in rows
        )
        return norm, rounding, turn, threads, vector, factors  # type: ignore[return-value]
    if width % 4:
        raise Unsupported(f"width {width} is no multiple of 4: PyTorch sums it in another order")
    return "TorchRms", rounding, turn, played_threads(width), 4, (0.0, 0.0)

