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
    """act(a) * b; `activation` is "gelu" or "silu". `a` and `b` name two arguments, or both the
    one whose halves they are, of which the argument `gate` says which is activated."""

    activation: str
    a: str = "input"
    b: str = "input"

    def triton(self, call: Call) -> Launch:
        from .triton import plan

        return plan(self, call)

    def cuda(self, call: Call) -> Launch:
        from ...backends.cuda import TYPES, CudaLaunch

        out = call["out"]
        width, dtype = out.shape[-1], out.dtype
        rows = rows_of(out.shape, [call[n] for n in self.pointers])
        sizes, strides = rows.padded()
        flat = [s for place in strides for s in place]
        vector = vector_width(width, dtype.itemsize, call.alignment, flat)
        vectors = rows.count * (width // vector)
        a, b = self.offsets(call)
        rounding = f"Each<{TYPES[dtype]}>" if call.exact else "Once"
        act = {"silu": "Silu", "gelu_tanh": "GeluTanh", "gelu_erf": "GeluErf"}[self.function(call)]
        fast = "false" if call.exact or dtype.itemsize == 4 else "true"
        return CudaLaunch(
            source="ops/glu/cuda.cuh",
            template=f"kernelwright::glu<{TYPES[dtype]}, {width}, {vector}, {BLOCK}, "
            f"{len(rows.sizes)}, {a}, {b}, kernelwright::{act}<{fast}>, "
            f"kernelwright::{rounding}>",
            arguments="kernelwright::GluArgs",
            grid=-(-vectors // BLOCK),
            block=BLOCK,
            pointers=self.pointers,
            layout="9q3I",
            scalars=(*flat, rows.count, sizes[1], sizes[2]),
            alignment=min(16, vector * dtype.itemsize),
        )

    @property
    def pointers(self) -> tuple[str, ...]:
        return self.a, self.b, "out"

    def offsets(self, call: Call) -> tuple[int, int]:
        """Where a and b begin in the rows of their tensors."""
        if self.a != self.b:
            return 0, 0
        half = call["out"].shape[-1]
        return (0, half) if call["gate"] == "first" else (half, 0)

    def function(self, call: Call) -> str:
        if self.activation == "silu":
            return "silu"
        return "gelu_tanh" if call["approximate"] else "gelu_erf"
