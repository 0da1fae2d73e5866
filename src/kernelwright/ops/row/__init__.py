"""The row kernel: residual, norm, modulation and gate in one pass over a row.

    s = residual + gate * x          (written to `sum`)
    n = norm(s) * weight + bias
    y = (n * (1 + scale) + shift) * out_gate

Every norm, modulation and gated residual of the library is this kernel with parts left out, so the
formula is written once for Triton (`triton.py`) and once for CUDA (`cuda.cuh`). An op names which
of its arguments plays which part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backends import Unsupported
from ..rows import Rows, rows_of

if TYPE_CHECKING:
    from ...backends import Launch
    from ..op import Call

# rows wider than this do not fit the registers of a block
MAX_WIDTH = 65536
PARTS = ("x", "residual", "gate", "weight", "bias", "scale", "shift", "out_gate", "y", "sum")
# the operands that have an address for each row; weight and bias are the same for all
PLACED = ("x", "residual", "gate", "scale", "shift", "out_gate", "y", "sum")


@dataclass(frozen=True)
class RowKernel:
    """Which argument of the op is which part of the row kernel. `norm` is "rms", "layer", "none",
    or the name of the argument that says so. `eight` and `eight_scale` are the result once more in
    eight bits (float8 e4m3, a scale a row), made where the argument `wanted` says so."""

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


@dataclass(frozen=True)
class RowCall:
    """One call in the row kernel's own words."""

    tensors: dict[str, Tensor | None]
    pointers: tuple[str, ...]
    norm: str
    eps: float
    eight: tuple[str, str] = ("", "")
    wanted: bool = False

    @property
    def width(self) -> int:
        return self.x.shape[-1]

    @property
    def x(self) -> Tensor:
        x = self.tensors["x"]
        assert x is not None
        return x

    def has(self, part: str) -> bool:
        return self.tensors[part] is not None

    def rows(self) -> Rows:
        if self.width > MAX_WIDTH:
            raise Unsupported(f"width {self.width}; kernels hold rows of up to {MAX_WIDTH}")
        placed = [self.tensors[p] for p in PLACED]
        frames = next(
            (t.shape[1] for t in placed if t is not None and t.ndim == self.x.ndim + 1), None
        )
        if frames is None:
            return rows_of(self.x.shape, [_spread(t, self.x) for t in placed])
        # per-frame modulation [B, F, 1, D]: see the tokens [B, S, D] as [B, F, S / F, D]
        split = [
            t.unflatten(1, (frames, -1))
            if t is not None and t.ndim == self.x.ndim and t.shape[1] == self.x.shape[1]
            else (None if t is None else _spread(t, self.x, frames=True))
            for t in placed
        ]
        x = split[0]
        assert x is not None
        return rows_of(x.shape, split)

    def dtype(self, *parts: str) -> torch.dtype:
        """The dtype these parts share, or that of x where all are absent."""
        found = {t.dtype for t in (self.tensors[p] for p in parts) if t is not None}
        if len(found) > 1:
            raise Unsupported(
                f"{' and '.join(parts)} have different dtypes {sorted(map(str, found))}"
            )
        return found.pop() if found else self.x.dtype


def check_eight_bits(call: Call) -> None:
    if call.target.capability < (8, 9):
        raise Unsupported("eight-bit floats need compute capability 8.9")


def by_width(x: Tensor, *_: Any) -> tuple[str, ...]:
    """Backends for an op whose first argument has rows like x. On H200 CUDA is level with Triton at
    widths of 2048 and 4096, and faster at 1536 and 3072 (gated_residual_norm: 26.4 against 28.7 us
    at 2x4096x1536, 29.5 against 31.6 at 4608x3072), and a kernel that is new compiles in a tenth of
    the time. Triton has heads of 128 (15.5 against 16.2 us at 4608x24x128)."""
    return ("cuda", "triton") if 1024 <= x.shape[-1] <= 4096 else ("triton", "cuda")


def _spread(t: Tensor | None, x: Tensor, frames: bool = False) -> Tensor | None:
    """A modulation [D], [B, D], [B, 1, D] or [B, S, D] with as many dimensions as the rows."""
    if t is None:
        return None
    if t.ndim == 2 and x.ndim > 2:
        t = t[(slice(None), *[None] * (x.ndim - 2))]
    if frames and t.ndim == x.ndim:
        t = t.unsqueeze(2)
    return t
