"""Launch choices of the CUDA kernel of attention in eight bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...backends import Unsupported
from ...backends.cuda import TYPES, CudaLaunch
from ..row.call import check_fp8
from .reference import ROWS

if TYPE_CHECKING:
    from ..plan import Call

QUERIES = 64  # of a warpgroup
STAGES = 4  # of tiles in shared memory; 3 and 6 were not faster on H200
BARRIERS = 1024  # bytes for them and for alignment


@dataclass(frozen=True)
class Shape:
    """Warpgroups of a block, keys that each takes at once, and the registers of their threads: with
    24 for those that copy, not more than what the block is started with."""

    groups: int
    keys: int
    registers: int
    rate: float  # TFLOP/s on H200 with enough work for all multiprocessors


# Timed on H200 at [1, 12, 32760, 128] and [1, 24, 17776, 64]. Blocks that stay and take several
# parts of the queries were slower (801 and 904 TFLOP/s instead of 900 and 939), and so were
# warpgroups that take turns at the tensor cores (786). All before TILES_OF_A_SUM.
SHAPES = {
    128: (Shape(2, 128, 240, 900), Shape(3, 64, 160, 939)),
    64: (Shape(3, 128, 160, 599),),
}


def plan_attention(call: Call) -> CudaLaunch:
    if call.target.capability != (9, 0):
        raise Unsupported("it was written for Hopper")
    check_fp8(call)
    query, out = call["query"], call["out"]
    batch, heads, queries, dim = query.shape
    if out.stride(3) != 1 or out.dtype.itemsize != 2:
        raise Unsupported("a result that is not written in pairs of 16 bits")

    def blocks(shape: Shape) -> int:
        return -(-queries // (shape.groups * QUERIES))

    def time(shape: Shape) -> float:
        """Multiprocessors take one block after the other; in the last turn many may be idle."""
        turns = -(-blocks(shape) * batch * heads // call.target.multiprocessors)
        return turns * shape.groups / shape.rate

    shape = min(SHAPES[dim], key=time)
    return CudaLaunch(
        source="ops/fp8_attention/cuda.cuh",
        template=f"kernelwright::eight_bit_attention<{TYPES[out.dtype]}, {dim}, {shape.groups}, "
        f"{STAGES}, {shape.registers}, {shape.keys}>",
        arguments="kernelwright::EightArgs",
        grid=blocks(shape) * batch * heads,
        block=(shape.groups + 1) * 128,
        pointers=("q8", "k8", "v8", "q_scale", "k_scale", "v_scale", "out"),
        layout="3q4i",
        scalars=(*out.stride()[:3], queries, call["keys"], heads, blocks(shape)),
        resident=1,
        # tiles of keys and values, and a sum in float32 of each result
        shared=2 * STAGES * ROWS * dim + shape.groups * QUERIES * dim * 4 + BARRIERS,
        of_architecture=True,
    )
