"""Launch choices of the CUDA kernel of linear layers with few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...backends import Unsupported
from ...backends.cuda import TYPES, CudaLaunch
from ..fp8.reference import DTYPE as FP8
from ..row.call import check_fp8
from . import is_eight_bits, most_rows

if TYPE_CHECKING:
    from ..plan import Call

WARPS = 4
# Outputs of a warp, and how many of its loads are under way for each; all warps of a block share
# them. On H200, one row, the layers of Llama-3-8B: 14.3, 10.4, 53.9 and 28.1 us in 16 bits (3.2 to
# 4.4 TB/s), 9.9, 7.2, 29.9 and 16.4 us in eight. With 2 outputs, 4 loads and a warp for each pair
# they took 14.6, 12.0, 56.9 and 33.5 us, and 9.6, 7.4, 30.7 and 19.2 us.
OUTPUTS, AHEAD = 4, 2
# A weight in eight bits and more than one row: a block has 16 outputs. Loads of each output under
# way in a thread, warps that share them, and blocks on a multiprocessor. On H200, fp8, the layers
# of Llama-3-8B: 10.2, 7.8, 34.0 and 20.2 us with 8 rows, 10.9, 8.7, 38.7 and 23.0 us with 16;
# products of single threads took 27.7, 20.7, 116.8 and 43.5 us with 8, cuBLAS in 16 bits 16.7,
# 12.9, 60.1 and 33.1 us. Such a kernel for a weight in 16 bits was no faster than cuBLAS. Not tuned
# for int8.
TILE_AHEAD, TILE_WARPS, RESIDENT = 4, 8, 3


def plan(call: Call) -> CudaLaunch:
    x, weight, glu = (call[n] for n in ("x", "weight", "glu"))
    eight = is_eight_bits(weight)
    if weight.dtype == FP8:
        check_fp8(call)
    n, k = weight.shape
    if x.dtype.itemsize != 2 or (weight.dtype != x.dtype and not eight):
        raise Unsupported(f"x of {x.dtype} and a weight of {weight.dtype}, expected 16 bits")
    rows, most = x.numel() // k if k else 0, most_rows(weight)
    # a row of x is loaded in pieces of 16 bytes as well
    if not 0 < rows <= most or k * weight.dtype.itemsize % 16 or k % 8:
        raise Unsupported(f"{rows} rows of {k}, it takes up to {most} of a multiple of 16 bytes")
    if not (x.is_contiguous() and weight.is_contiguous()) or call.alignment < 16:
        raise Unsupported("a tensor is not contiguous, or not aligned to 16 bytes")
    if call["bias"] is not None and call["bias"].dtype != x.dtype:
        raise Unsupported(f"a bias of {call['bias'].dtype}")
    made = n // 2 if glu else n
    x_type = TYPES[x.dtype]
    w_type = f"kernelwright::{'Eight' if weight.dtype == FP8 else 'Integer'}" if eight else x_type
    pointers = ("x", "weight", "bias", "scale" if eight else "", "out")
    gated = str(glu).lower()
    if eight and rows > 1:
        return CudaLaunch(
            source="ops/few_rows/tensor_cores.cuh",
            template=f"kernelwright::rows_by_tensor_cores<{x_type}, {w_type}, {-(-rows // 8)}, "
            f"{TILE_AHEAD}, {TILE_WARPS}, {gated}>",
            arguments="kernelwright::TensorCoreRowsArgs",
            grid=-(-made // (8 if glu else 16)),
            block=32 * TILE_WARPS,
            pointers=pointers,
            layout="3I",
            scalars=(made, k, rows),
            alignment=16,
            resident=RESIDENT,
        )
    return CudaLaunch(
        source="ops/few_rows/cuda.cuh",
        template=f"kernelwright::few_rows<{x_type}, {w_type}, "
        f"{rows}, {OUTPUTS}, {AHEAD}, {WARPS}, {gated}>",
        arguments="kernelwright::FewRowsArgs",
        grid=-(-made // (OUTPUTS // 2 if glu else OUTPUTS)),
        block=32 * WARPS,
        pointers=pointers,
        layout="2I",
        scalars=(made, k),
        alignment=16,
    )
