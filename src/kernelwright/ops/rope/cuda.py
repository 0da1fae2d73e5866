"""Launch choices of the CUDA rotary kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...backends import Unsupported
from ...backends.cuda import TYPES, CudaLaunch
from ..row.order import Order, eager_mean_order, free_threads, mean_order, rms_order
from ..rows import Rows, vector_width
from .call import EMPTY, RopeCall

if TYPE_CHECKING:
    from ..plan import Call

# floats of shared memory through which a block exchanges the halves of its rows
MAX_EXCHANGE = 6144
# from this width on a vector is 16 bytes of the widest operand: a vector of 8 float32 table columns
# would be two half-used accesses (24 against 35 us at 2x2688x2048 on H200). Narrower rows would
# have too few elements per thread (46 against 39 us at 4608x48x128).
WIDE = 1024
# with tables of half the width, 4 elements per vector and 128 threads per row: 31 us, against 45
# with 8 and the threads of other rows, in place at 2x2688x2048 on H200
NARROW_TABLES = {"threads": 128, "vector": 4}

# Heads per thread group in free order and in eager's order, if there are at least FULL rows per
# multiprocessor: the heads share one read of the table, and their loads overlap. On H200, us for
# 1, 2, 4 and 8 heads: 43.8, 33.4, 31.3, 35.2 in free order and 47.2, 34.7, 37.6, 37.8 in the order
# of diffusers at 4608x48x128; 30.2, 26.1, 24.5, 28.0 and 38.3, 29.3, 29.7, 31.9 in that of
# transformers at 4096x40x128.
EACH, EXACT_EACH, FULL = 4, 2, 128


def plan(rope: RopeCall, call: Call) -> CudaLaunch:
    q_rows, k_rows = rope.rows("query"), rope.rows("key") or EMPTY
    assert q_rows is not None
    both = (q_rows, k_rows)
    (q_sizes, q_strides), (k_sizes, k_strides) = (r.padded() for r in both)
    places = [s for pair in zip(q_strides, k_strides, strict=True) for place in pair for s in place]
    width, dtype = rope.width, rope.query.dtype
    table = rope.dtype("cos", "sin") if rope.rotates else torch.float32
    # elements per access: it must not split a pair, nor cross from one half to the other
    room = vector_width(width, dtype.itemsize, call.alignment, places)
    rotated = rope.rotation // 2 if rope.layout == "half" else rope.rotation
    if rope.rotates:
        room = vector_width(rotated, dtype.itemsize, room * dtype.itemsize, ())
    order = _order(rope, call.exact, both, room)
    vector = order.vector or max(2, min(room, _widest(rope, table)))
    if width % vector or (rope.rotates and rotated % vector):
        raise Unsupported(f"rows of {width} with rotations of {rope.rotation} cannot be vectorised")
    if call.exact and rope.norm and vector > room:
        raise Unsupported("exact order needs rows aligned as PyTorch's vectorised kernel does")
    threads = order.threads or free_threads(width, vector)
    block = max(128, threads)
    while block > threads and rope.layout == "half" and block // threads * width > MAX_EXCHANGE:
        block //= 2
    if rope.layout == "half" and rope.rotates and block // threads * width > MAX_EXCHANGE:
        raise Unsupported(f"rows of {width} are too wide to exchange halves")
    each = _each(rope, both, vector * threads == width and threads <= 32, call)
    q_blocks, k_blocks = (-(-r.count // (block // threads * each)) for r in both)
    layout = {"interleaved": "INTERLEAVED", "half": "HALF"}[rope.layout]
    weighted = rope.tensors["q_weight"] is not None
    types = ", ".join(TYPES[t] for t in (dtype, rope.dtype("q_weight", "k_weight"), table))
    rounding, turn = _roundings(rope, call.exact, table)
    dims = max(len(r.sizes) for r in both)
    return CudaLaunch(
        source="ops/rope/cuda.cuh",
        template=f"kernelwright::rope<{types}, kernelwright::Spread<{width}, {vector}, {threads}>, "
        f"{min(room, vector)}, {block}, {each}, {dims}, {rope.rotation}, "
        f"kernelwright::{layout if rope.rotates else 'UNROTATED'}, {str(rope.half_table).lower()}, "
        f"{str(weighted).lower()}, kernelwright::{order.norm}, kernelwright::{rounding}, "
        f"kernelwright::{turn}>",
        arguments="kernelwright::RopeArgs",
        grid=q_blocks + k_blocks,
        block=block,
        pointers=rope.pointers,
        layout="24q8I3f",
        scalars=(
            *places,
            q_rows.count,
            *q_sizes[1:],
            k_rows.count,
            *k_sizes[1:],
            q_blocks,
            q_blocks // k_blocks if k_blocks and q_blocks % k_blocks == 0 else 0,
            rope.eps,
            order.factor,
            order.factor if k_rows.count == q_rows.count else _k_factor(rope, call.exact, both),
        ),
        alignment=min(16, min(room, vector) * dtype.itemsize),
    )


def _each(rope: RopeCall, rows: tuple[Rows, Rows], alone: bool, call: Call) -> int:
    """Rows per thread group; `alone`: a row is one vector per thread, without shared memory."""
    if not alone or (rope.rotates and rope.layout == "half" and rope.width != rope.rotation):
        return 1
    each = EXACT_EACH if call.exact and rope.norm else EACH
    if sum(r.count for r in rows) < each * FULL * call.target.multiprocessors:
        return 1
    for r in rows:
        sizes, strides = r.padded()
        # the operands' order: rows, cos, sin, output
        if r.count and (sizes[2] % each or (rope.rotates and (strides[1][2] or strides[2][2]))):
            return 1
    return each


def _widest(rope: RopeCall, table: torch.dtype) -> int:
    if rope.width < WIDE:
        return 16
    columns = table.itemsize // 2 if rope.half_table else table.itemsize
    return 16 // max(rope.query.dtype.itemsize, columns)


def _order(rope: RopeCall, chain: str | None, rows: tuple[Rows, Rows], room: int) -> Order:
    """The summation order of the norm: free, or that of the eager chain."""
    if not rope.norm:
        return Order("NoNorm")
    if chain is None:
        wide = WIDE <= rope.width <= 8192 and rope.half_table and room >= NARROW_TABLES["vector"]
        return Order("FreeRms", **NARROW_TABLES) if wide else Order("FreeRms")
    if rope.dtype("q_weight", "k_weight") != rope.query.dtype:
        raise Unsupported("eager would promote the rows by their weights")
    if chain != "transformers":
        return rms_order(rope.width, rope.query.dtype.itemsize, room)
    orders = [eager_mean_order(rope.width, r.count, room) for r in rows if r.count]
    if len({(o.norm, o.threads, o.vector) for o in orders}) > 1:
        raise Unsupported("at::mean sums so few query and key rows in different orders")
    if orders[0].vector == 1 and rope.rotates and rope.layout == "interleaved":
        raise Unsupported(f"at::mean reads rows of {rope.width} one by one, pairs are two")
    return orders[0]


def _k_factor(rope: RopeCall, chain: str | None, rows: tuple[Rows, Rows]) -> float:
    if chain != "transformers" or not rope.norm or not rows[1].count:
        return 0.0
    return mean_order(rope.width, rows[1].count, 1).factor


def _roundings(rope: RopeCall, chain: str | None, table: torch.dtype) -> tuple[str, str]:
    """How the norm rounds, and how the rotation does."""
    dtype = rope.query.dtype
    if chain is None:
        return "Once", "Once"
    step = torch.float32 if chain == "diffusers" else torch.promote_types(dtype, table)
    if chain == "transformers" and rope.rotates and step != dtype:
        raise Unsupported(f"eager would promote {dtype} rows by {table} tables")
    return (f"Each<{TYPES[dtype]}>" if rope.norm else "Once"), f"Each<{TYPES[step]}>"
