"""Launch choices of the CUDA kernel of gated linear units."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...backends.cuda import TYPES, CudaLaunch
from .. import ways
from ..rows import rows_of, vector_width
from .call import GluCall

if TYPE_CHECKING:
    from ..plan import Call

BLOCK = 256


def plan(glu: GluCall, call: Call) -> CudaLaunch:
    out = call["out"]
    width, dtype = out.shape[-1], out.dtype
    rows = rows_of(out.shape, [call[n] for n in glu.pointers])
    sizes, strides = rows.padded()
    flat = [s for place in strides for s in place]
    vector = vector_width(width, dtype.itemsize, call.alignment, flat)
    vectors = rows.count * (width // vector)
    a, b = glu.offsets
    rounding = f"Each<{TYPES[dtype]}>" if call.exact else "Once"
    act = _activation(glu.function, bool(call.exact), fast=not call.exact and dtype.itemsize == 2)
    return CudaLaunch(
        source="ops/glu/cuda.cuh",
        template=f"kernelwright::glu<{TYPES[dtype]}, {width}, {vector}, {BLOCK}, "
        f"{len(rows.sizes)}, {a}, {b}, kernelwright::{act}, "
        f"kernelwright::{rounding}>",
        arguments="kernelwright::GluArgs",
        grid=-(-vectors // BLOCK),
        block=BLOCK,
        pointers=glu.pointers,
        layout="9q3I",
        scalars=(*flat, rows.count, sizes[1], sizes[2]),
        alignment=min(16, vector * dtype.itemsize),
    )


def _activation(function: str, exact: bool, fast: bool) -> str:
    """Its name in the CUDA sources; in exact mode with the arithmetic of PyTorch."""
    if exact and function == "gelu_erf":
        return ways.gelu_erf()
    if exact:
        ways.way({"silu": "silu", "gelu_tanh": "F.gelu tanh"}[function])
    name = {"silu": "Silu", "gelu_tanh": "GeluTanh", "gelu_erf": "GeluErf"}[function]
    return f"{name}<{str(fast).lower()}>"
