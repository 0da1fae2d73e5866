"""The gated-unit kernel and its launch choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..rows import rows_of, vector_width

if TYPE_CHECKING:
    from ...backends import Launch
    from ..op import Call

BLOCK = 256


@dataclass(frozen=True)
class GluKernel:
    """act(gate half) * other half; `activation` is "gelu" or "silu"."""

    activation: str

    def triton(self, call: Call) -> Launch:
        from .triton import plan

        return plan(self.function(call), call["gate"] == "first", call)

    def cuda(self, call: Call) -> Launch:
        from ...backends.cuda import TYPES, CudaLaunch

        x, out = call["input"], call["out"]
        width, dtype = out.shape[-1], x.dtype
        rows = rows_of(out.shape, [x, out])
        sizes, strides = rows.padded()
        flat = [s for place in strides for s in place]
        vector = vector_width(width, dtype.itemsize, call.alignment, flat)
        vectors = rows.count * (width // vector)
        rounding = f"Each<{TYPES[dtype]}>" if call.exact else "Once"
        act = {"silu": "Silu", "gelu_tanh": "GeluTanh", "gelu_erf": "GeluErf"}[self.function(call)]
        fast = "false" if call.exact or dtype.itemsize == 4 else "true"
        return CudaLaunch(
            source="ops/glu/cuda.cuh",
            template=f"kernelwright::glu<{TYPES[dtype]}, {width}, {vector}, {BLOCK}, "
            f"{len(rows.sizes)}, {str(call['gate'] == 'first').lower()}, "
            f"kernelwright::{act}<{fast}>, kernelwright::{rounding}>",
            arguments="kernelwright::GluArgs",
            grid=-(-vectors // BLOCK),
            block=BLOCK,
            pointers=("input", "out"),
            layout="6q3I",
            scalars=(*flat, rows.count, sizes[1], sizes[2]),
            alignment=min(16, vector * dtype.itemsize),
        )

    def function(self, call: Call) -> str:
        if self.activation == "silu":
            return "silu"
        return "gelu_tanh" if call["approximate"] else "gelu_erf"
