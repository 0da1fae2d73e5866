"""Which GELU kernel to launch, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...backends.cuda import TYPES, CudaLaunch
from .. import ways
from ..rows import rows_of, vector_width

if TYPE_CHECKING:
    from ..plan import Call

BLOCK = 256
# The kernel with a table: threads per block, blocks per multiprocessor, and vectors that a thread
# loads at once. 5376 x 8192 bfloat16 on an H200, us: 46.0; with 4 vectors 49.7, with 1024 threads
# or 4 blocks 48.5 and more; F.gelu 50.0, its arithmetic in this kernel 51.7, a copy 43.1.
TABLE_BLOCK, RESIDENT, AHEAD = 512, 2, 2
# with fewer elements, computing the table costs more than it saves
TABLE_ELEMENTS = 1 << 21


def plan(call: Call) -> CudaLaunch:
    out = call["out"]
    width, dtype = out.shape[-1], out.dtype
    rows = rows_of(out.shape, [call["input"], out])
    sizes, strides = rows.padded()
    flat = [s for place in strides for s in place]
    vector = vector_width(width, dtype.itemsize, call.alignment, flat)
    vectors = rows.count * (width // vector)
    if dtype == torch.bfloat16 and vector == 8 and TABLE_ELEMENTS <= 8 * vectors < 8 << 31:
        block = TABLE_BLOCK
        grid = min(RESIDENT * call.target.multiprocessors, -(-vectors // (block * AHEAD)))
        template = (
            f"gelu_table<{TYPES[dtype]}, {width}, {block}, {AHEAD}, {len(rows.sizes)}, "
            f"kernelwright::{_form(call, fast=False)}>"
        )
    else:
        fast = not call.exact and dtype.itemsize == 2
        block, grid = BLOCK, -(-vectors // BLOCK)
        template = (
            f"gelu<{TYPES[dtype]}, {width}, {vector}, {block}, {len(rows.sizes)}, "
            f"kernelwright::{_form(call, fast)}>"
        )
    return CudaLaunch(
        source="ops/gelu/cuda.cuh",
        template=f"kernelwright::{template}",
        arguments="kernelwright::GeluArgs",
        grid=grid,
        block=block,
        pointers=("input", "out"),
        layout="6q3I",
        scalars=(*flat, rows.count, sizes[1], sizes[2]),
        alignment=min(16, vector * dtype.itemsize),
    )


def _form(call: Call, fast: bool) -> str:
    """The form of GELU in the CUDA sources; in exact mode with the arithmetic of PyTorch."""
    if call["approximate"]:
        if call.exact:
            ways.way("F.gelu tanh")
        return f"GeluTanh<{str(fast).lower()}>"
    return ways.gelu_erf() if call.exact else f"GeluErf<{str(fast).lower()}>"
