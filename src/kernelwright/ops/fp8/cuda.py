"""Launch choices of the CUDA kernel that quantises rows to fp8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...backends import Unsupported
from ...backends.cuda import TYPES, CudaLaunch
from ..row.call import check_fp8
from ..rows import rows_of, vector_width

if TYPE_CHECKING:
    from ..plan import Call

ACTIVATIONS = {
    "none": "Unchanged",
    "silu": "NearSilu",
    "gelu_tanh": "NearGeluTanh",
    "gelu": "GeluErf<false>",
}
# Elements that a thread holds, in float32. On H200, us for 16, 32, 48: with GELU 37.8, 34.0, 37.0
# at 5376x8192 and 50.8, 42.3, 47.3 at 4608x12288, SwiGLU 78.0, 70.5, 92.5 at 4096x14336; but GELU
# 230, 243, 221 at 32760x8960, and 63.5, 56.8, 51.3 for concatenated rows of 3072 and 12288.
EACH, EACH_WIDE, WIDE = 32, 48, 8192
MOST = 64
WARP, BLOCK, MAX_THREADS = 32, 128, 1024


def plan(call: Call) -> CudaLaunch:
    x, up, left, out = (call[n] for n in ("x", "up", "left", "out"))
    check_fp8(call)
    width, left_width = x.shape[-1], 0 if left is None else left.shape[-1]
    if not width or (left is not None and not left_width):
        raise Unsupported("a part of its rows is empty")
    if left is not None and left.dtype != x.dtype:
        raise Unsupported(f"left is {left.dtype}, x is {x.dtype}")
    rows = rows_of(out.shape, [x, up, left, out])
    sizes, strides = rows.padded()
    places = [s for place in strides for s in place]
    vector = vector_width(width, x.dtype.itemsize, call.alignment, [*places, left_width])
    threads = row_threads(out.shape[-1], gated=up is not None)
    block = BLOCK if BLOCK % threads == 0 else threads
    return CudaLaunch(
        source="ops/fp8/cuda.cuh",
        template=f"kernelwright::eight<{TYPES[x.dtype]}, {width}, {left_width}, {vector}, "
        f"{threads}, {block}, {len(rows.sizes)}, {str(up is not None).lower()}, "
        f"kernelwright::{ACTIVATIONS[call['activation']]}>",
        arguments="kernelwright::EightArgs",
        grid=-(-rows.count // (block // threads)),
        block=block,
        pointers=("x", "up", "left", "out", "scale"),
        layout="12q3I",
        scalars=(*places, rows.count, sizes[1], sizes[2]),
        alignment=min(16, vector * x.dtype.itemsize),
    )


def row_threads(width: int, gated: bool) -> int:
    """Threads that share a row: whole warps."""
    each = EACH_WIDE if width > WIDE and width % 4096 and not gated else EACH
    threads = min(MAX_THREADS, WARP * -(-width // (WARP * each)))
    if width > threads * MOST:
        raise Unsupported(f"rows of {width} elements, the kernel holds {MAX_THREADS * MOST}")
    return threads
