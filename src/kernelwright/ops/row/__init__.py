"""The row kernel: residual, norm, modulation and gate in one pass over a row.

    s = residual + gate * x          (written to `sum`)
    n = norm(s) * weight + bias
    y = (n * (1 + scale) + shift) * out_gate

Every norm, modulation and gated residual of the library is this kernel with parts left out, so the
formula is in one place for Triton (`triton.py`) and in one for CUDA (`cuda.cuh`). An op says which
of its arguments is which part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .call import PARTS, RowCall

if TYPE_CHECKING:
    from ...backends import Launch
    from ..plan import Call


@dataclass(frozen=True)
class RowKernel:
    """Which argument of the op is which part of the row kernel. `norm` is "rms", "layer", "none",
    or the name of the argument that holds the kind. `eight` and `eight_scale` are the result once
    more in fp8 (e4m3, one scale per row), computed if the argument `wanted` is True."""

    norm: str
    x: str = "input"
    y: str = "out"
    residual: str = ""
    gate: str = ""
    weight: str = ""
    bias: str = ""
    scale: str = ""
    shift: str = ""
    out_gate: str = ""
    sum: str = ""
    eight: str = ""
    eight_scale: str = ""
    wanted: str = ""

    def triton(self, call: Call) -> Launch:
        from .triton import plan

        return plan(self.bind(call), call)

    def cuda(self, call: Call) -> Launch:
        from .cuda import plan

        return plan(self.bind(call), call)

    def bind(self, call: Call) -> RowCall:
        names = tuple(getattr(self, part) for part in PARTS)
        tensors = {p: call[n] if n else None for p, n in zip(PARTS, names, strict=True)}
        norm = call.get(self.norm, self.norm)
        eight = (self.eight, self.eight_scale)
        wanted = bool(call.get(self.wanted, False))
        return RowCall(tensors, names, norm, float(call.get("eps", 0.0)), eight, wanted)


def by_width(x: Tensor, *_: Any) -> tuple[str, ...]:
    """Backends by measured speed, for an op whose first argument has rows like x. On H200 CUDA ties
    with Triton at widths of 2048 and 4096, is faster at 1536 and 3072 (gated_residual_norm: 26.4
    against 28.7 us at 2x4096x1536, 29.5 against 31.6 at 4608x3072), and compiles in a tenth of the
    time. Triton is faster for heads of 128 (15.5 against 16.2 us at 4608x24x128)."""
    return ("cuda", "triton") if 1024 <= x.shape[-1] <= 4096 else ("triton", "cuda")
