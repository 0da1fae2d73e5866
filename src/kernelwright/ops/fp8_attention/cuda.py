"""Launch choices of the CUDA kernels of attention in eight bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...backends import Unsupported
from ...backends.cuda import TYPES, CudaLaunch
from ..row.call import check_fp8
from .reference import LOG2E, ROWS, padded

if TYPE_CHECKING:
    from ..plan import Call

QUERIES = 64  # of a warpgroup
STAGES = 4  # of tiles in shared memory; 3 and 6 were not faster on H200
BARRIERS = 1024  # bytes for them and for alignment

# By head dimension: warpgroups of a block that attend, and registers of their threads; with 24 for
# those that copy, not more than what the block is started with. Timed on H200: 1,134 TFLOP/s at
# [1, 12, 32760, 128], 907 at [2, 48, 17776, 64]. An earlier kernel, of 959 and 726, was slower with
# 64 keys at once, by three warpgroups (949 of head_dim 128) or with the scores of the next ones
# started ahead (833 and 590), and in blocks that stay and take several parts of the queries.
SHAPES = {128: (2, 240), 64: (3, 160)}


# Of the kernel that quantises: blocks on a multiprocessor by head dimension, as many as have room
# for their tiles, so that some copy while others compute.
QUANTIZING = {128: 5, 64: 6}


def _check(call: Call) -> None:
    if call.target.capability != (9, 0):
        raise Unsupported("it was written for Hopper")
    check_fp8(call)


def plan_quantize(call: Call) -> CudaLaunch:
    _check(call)
    key, value = call["key"], call["value"]
    batch, heads, keys, dim = key.shape
    strides = *key.stride()[:3], *value.stride()[:3]
    aligned = next(
        (n for n in (8, 4) if not any(s % n for s in (call.alignment // 2, *strides))), 0
    )
    if key.dtype.itemsize != 2 or (key.stride(3), value.stride(3)) != (1, 1) or not aligned:
        raise Unsupported("keys or values that cannot be read four at once")
    tiles = padded(keys) // ROWS
    return CudaLaunch(
        source="ops/fp8_attention/quantize.cuh",
        template=f"kernelwright::quantize_kv<{TYPES[key.dtype]}, {dim}, {aligned}>",
        arguments="kernelwright::QuantizeArgs",
        grid=2 * tiles * batch * heads,
        block=256,
        pointers=("key", "value", "k8", "v8", "scales"),
        layout="6q3i",
        scalars=(*strides, keys, heads, tiles),
        resident=QUANTIZING[dim],
    )


def plan_attention(call: Call) -> CudaLaunch:
    _check(call)
    query, out = call["query"], call["out"]
    batch, heads, queries, dim = query.shape
    if query.dtype.itemsize != 2 or out.stride(3) != 1 or any(s % 4 for s in out.stride()[:3]):
        raise Unsupported("a result that cannot be written four at once")
    if call.alignment % 8 or query.stride(3) != 1 or any(s % 4 for s in query.stride()[:3]):
        raise Unsupported("queries that cannot be read four at once")
    groups, registers = SHAPES[dim]
    blocks = -(-queries // (groups * QUERIES))  # of a head
    return CudaLaunch(
        source="ops/fp8_attention/cuda.cuh",
        template=f"kernelwright::eight_bit_attention<{TYPES[out.dtype]}, {dim}, {groups}, "
        f"{STAGES}, {registers}>",
        arguments="kernelwright::EightArgs",
        grid=blocks * batch * heads,
        block=(groups + 1) * 128,
        pointers=("query", "k8", "v8", "scales", "out"),
        layout="6q4if",
        scalars=(
            *(*query.stride()[:3], *out.stride()[:3], queries, call["keys"], heads, blocks),
            call["scale"] * LOG2E,
        ),
        resident=1,
        # tiles of keys and values, and a sum in float32 of each result
        shared=2 * STAGES * ROWS * dim + groups * QUERIES * dim * 4 + BARRIERS,
        of_architecture=True,
    )
