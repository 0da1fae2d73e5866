"""One call of the rotary kernel, as its Triton and CUDA planners see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...backends import Unsupported
from ..rows import Rows, rows_of
from .tables import over_rows

PARTS = ("query", "key", "q_weight", "k_weight", "cos", "sin", "q_out", "k_out")
MAX_WIDTH = 16384
# the rows of an absent key
EMPTY = Rows((0,), ((0,), None, None, (0,)))


@dataclass(frozen=True)
class RopeCall:
    """The tensors of a call by their part in the rotary kernel; the pairs repeat every `rotation`
    elements."""

    tensors: dict[str, Tensor | None]
    pointers: tuple[str, ...]
    norm: bool
    rotation: int
    layout: str
    eps: float

    @property
    def query(self) -> Tensor:
        query = self.tensors["query"]
        assert query is not None
        return query

    @property
    def width(self) -> int:
        return self.query.shape[-1]

    @property
    def rotates(self) -> bool:
        return self.tensors["cos"] is not None

    @property
    def half_table(self) -> bool:
        cos = self.tensors["cos"]
        return cos is not None and cos.shape[-1] != self.rotation

    def dtype(self, *parts: str) -> torch.dtype:
        found = [t.dtype for t in (self.tensors[p] for p in parts) if t is not None]
        if len(set(found)) > 1:
            raise Unsupported(f"{' and '.join(parts)} have different dtypes")
        return found[0] if found else self.query.dtype

    def rows(self, part: str) -> Rows | None:
        """Rows of query or key, with the strides of itself, cos, sin and its output."""
        x, out = self.tensors[part], self.tensors[f"{part[0]}_out"]
        if x is None:
            return None
        if x.shape[-1] != self.width:
            raise Unsupported(f"key rows are {x.shape[-1]} wide, query rows {self.width}")
        if self.width > MAX_WIDTH:
            raise Unsupported(f"width {self.width}; kernels hold rows of up to {MAX_WIDTH}")
        tables = [self.tensors["cos"], self.tensors["sin"]]
        cos, sin = (None if t is None else over_rows(t, x) for t in tables)
        found = rows_by_table(x, cos, sin, [x, out])
        of_cos, of_sin, of_x, of_out = found.strides
        return Rows(found.sizes, (of_x, of_cos, of_sin, of_out))


def rows_by_table(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, operands: Sequence[Tensor | None]
) -> Rows:
    """The rows of x with the strides of cos, sin and the operands. Rows with the same table row are
    neighbours, so that it is fetched once: at LTX's 2x2688x2048 the tables are as large as the
    query."""
    if cos is None or sin is None:
        return rows_of(x.shape, [None, None, *operands])
    lead = x.shape[:-1]
    cos, sin = (t.expand(*lead, t.shape[-1]) for t in (cos, sin))
    order = sorted(range(len(lead)), key=lambda d: cos.stride(d) == 0)
    placed = [None if t is None else t.permute(*order, -1) for t in (cos, sin, *operands)]
    return rows_of([lead[d] for d in order] + [x.shape[-1]], placed)


def merge_heads(t: Tensor, part: str) -> Tensor:
    """[B, S, heads, D] as [B, S, heads * D], without a copy."""
    if t.shape[2] > 1 and t.stride(2) != t.shape[3]:
        raise Unsupported(f"{part}: heads of a token are not side by side in memory")
    shape, stride = (*t.shape[:2], t.shape[2] * t.shape[3]), (*t.stride()[:2], 1)
    return t.as_strided(shape, stride)
