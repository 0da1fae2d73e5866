"""Launch choices of the CUDA kernel of attention in eight bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...backends import Unsupported
from ...backends.cuda import TYPES, CudaLaunch
from ..row.call import check_fp8
from .reference import ROWS

if TYPE_CHECKING:
    from ..plan import Call

QUERIES = 64  # of a warpgroup
# by head_dim: warpgroups, stages of tiles in shared memory, registers of a thread
SHAPES = {128: (2, 4, 240), 64: (3, 6, 160)}
BARRIERS = 1024  # bytes for them and for alignment


def plan_attention(call: Call) -> CudaLaunch:
    if call.target.capability != (9, 0):
        raise Unsupported("it was written for Hopper")
    check_fp8(call)
    query, out = call["query"], call["out"]
    batch, heads, queries, dim = query.shape
    if out.stride(3) != 1 or out.dtype.itemsize != 2:
        raise Unsupported("a result that is not written in pairs of 16 bits")
    groups, stages, registers = SHAPES[dim]
    blocks = -(-queries // (groups * QUERIES))
    return CudaLaunch(
        source="ops/fp8_attention/cuda.cuh",
        template=f"kernelwright::eight_bit_attention<{TYPES[out.dtype]}, {dim}, {groups}, "
        f"{stages}, {registers}>",
        arguments="kernelwright::EightArgs",
        grid=blocks * batch * heads,
        block=(groups + 1) * 128,
        pointers=("q8", "k8", "v8", "q_scale", "k_scale", "v_scale", "out"),
        layout="3q4i",
        scalars=(*out.stride()[:3], queries, call["keys"], heads, blocks),
        resident=1,
        shared=2 * stages * ROWS * dim + BARRIERS,
        of_architecture=True,
    )
