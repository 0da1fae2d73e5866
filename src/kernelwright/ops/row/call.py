"""One call of the row kernel, as its Triton and CUDA planners see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...backends import Unsupported
from ..rows import Rows, rows_of

if TYPE_CHECKING:
    from ..plan import Call

# rows wider than this do not fit the registers of a block
MAX_WIDTH = 65536
PARTS = ("x", "residual", "gate", "weight", "bias", "scale", "shift", "out_gate", "y", "sum")
# operands with an address for each row; weight and bias are the same for all rows
PLACED = ("x", "residual", "gate", "scale", "shift", "out_gate", "y", "sum")

# parts that several rows may share; their gradients are sums over rows
SHARED = ("weight", "bias", "scale", "shift", "gate", "out_gate")


@dataclass(frozen=True)
class RowCall:
    """The tensors of a call by their part in the row kernel; `pointers` are their op names."""

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
        placed = over_rows([self.tensors[p] for p in PLACED], self.x)
        x = placed[0]
        assert x is not None
        return rows_of(x.shape, placed)

    def dtype(self, *parts: str) -> torch.dtype:
        """The dtype that these parts share; that of x if all are absent."""
        found = {t.dtype for t in (self.tensors[p] for p in parts) if t is not None}
        if len(found) > 1:
            raise Unsupported(
                f"{' and '.join(parts)} have different dtypes {sorted(map(str, found))}"
            )
        return found.pop() if found else self.x.dtype


def check_fp8(call: Call) -> None:
    if call.target.capability < (8, 9):
        raise Unsupported("eight-bit floats need compute capability 8.9")


def over_rows(operands: Sequence[Tensor | None], x: Tensor) -> list[Tensor | None]:
    """The operands shaped to broadcast over the rows of x. With a modulation per frame [B, F, 1, D]
    tokens [B, S, D] are viewed as [B, F, S / F, D]."""
    frames = next((t.shape[1] for t in operands if t is not None and t.ndim == x.ndim + 1), None)

    def shaped(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        if frames is not None and t.ndim == x.ndim and t.shape[1] == x.shape[1]:
            return t.unflatten(1, (frames, -1))
        if t.ndim == 2 and x.ndim > 2:
            t = t[(slice(None), *[None] * (x.ndim - 2))]
        if frames is not None and t.ndim == x.ndim:
            t = t.unsqueeze(2)
        return t

    return [shaped(t) for t in operands]
