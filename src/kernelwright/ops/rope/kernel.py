"""The rotary kernel: RMSNorm and rotation of query and key in one launch, either part absent.

`apply_rope`, the grid ropes and `qk_norm_rope` are this kernel with parts left out; the formula is
written once for Triton (`triton.py`) and once for CUDA (`cuda.cuh`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...backends import Unsupported
from ..rows import Rows, rows_of
from .tables import over_rows

if TYPE_CHECKING:
    from ...backends import Launch
    from ..op import Call

PLACES = ("query", "key", "q_weight", "k_weight", "cos", "sin", "q_out", "k_out")
MAX_WIDTH = 16384
# rows of a key that is not there
EMPTY = Rows((0,), ((0,), None, None, (0,)))


@dataclass(frozen=True)
class RopeKernel:
    """Which argument of the op is which part of the rotary kernel; "" where it has none."""

    query: str = "query"
    key: str = "key"
    q_weight: str = ""
    k_weight: str = ""
    cos: str = "cos"
    sin: str = "sin"
    q_out: str = "q_out"
    k_out: str = "k_out"
    norm: bool = False

    def triton(self, call: Call) -> Launch:
        from .triton import plan

        return plan(self.bind(call), call)

    def cuda(self, call: Call) -> Launch:
        from .cuda import plan

        return plan(self.bind(call), call)

    def bind(self, call: Call) -> RopeCall:
        names = tuple(getattr(self, place) for place in PLACES)
        tensors = {p: call[n] if n else None for p, n in zip(PLACES, names, strict=True)}
        across = bool(call.get("across_heads", False))
        query = tensors["query"]
        rotation = query.shape[-1]
        if across and query.ndim == 4:
            heads = query.shape[2] * query.shape[3]
            cos = tensors["cos"]
            if cos is not None and cos.shape[-1] in (heads, heads // 2) and cos.ndim < 4:
                rotation = heads
            for place in ("query", "key", "q_out", "k_out"):
                t = tensors[place]
                tensors[place] = None if t is None else _merge_heads(t, place)
        return RopeCall(
            tensors, names, self.norm, rotation, call["layout"], float(call.get("eps", 0.0))
        )


@dataclass(frozen=True)
class RopeCall:
    """One call in the rotary kernel's own words; `rotation` is the width that pairs repeat over."""

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

    def dtype(self, *places: str) -> torch.dtype:
        found = [t.dtype for t in (self.tensors[p] for p in places) if t is not None]
        if len(set(found)) > 1:
            raise Unsupported(f"{' and '.join(places)} have different dtypes")
        return found[0] if found else self.query.dtype

    def rows(self, place: str) -> Rows | None:
        """Rows of query or key, with the strides of itself, cos, sin and its output."""
        x, out = self.tensors[place], self.tensors[f"{place[0]}_out"]
        if x is None:
            return None
        if x.shape[-1] != self.width:
            raise Unsupported(f"key rows are {x.shape[-1]} wide, query rows {self.width}")
        if self.width > MAX_WIDTH:
            raise Unsupported(f"width {self.width}; kernels hold rows of up to {MAX_WIDTH}")
        tables = [self.tensors["cos"], self.tensors["sin"]]
        cos, sin = (None if t is None else over_rows(t, x) for t in tables)
        if cos is None or sin is None:
            return rows_of(x.shape, [x, None, None, out])
        # rows that share a table line follow each other, so the line is fetched once: at LTX's
        # 2x2688x2048 the tables are as large as the query
        lead = x.shape[:-1]
        cos, sin = (t.expand(*lead, t.shape[-1]) for t in (cos, sin))
        order = sorted(range(len(lead)), key=lambda d: cos.stride(d) == 0)
        placed = [None if t is None else t.permute(*order, -1) for t in (x, cos, sin, out)]
        return rows_of([lead[d] for d in order] + [x.shape[-1]], placed)


def _merge_heads(t: Tensor, place: str) -> Tensor:
    """[B, S, heads, D] as [B, S, heads * D], without a copy."""
    if t.shape[2] > 1 and t.stride(2) != t.shape[3]:
        raise Unsupported(f"{place}: heads of a token are not side by side in memory")
    shape, stride = (*t.shape[:2], t.shape[2] * t.shape[3]), (*t.stride()[:2], 1)
    return t.as_strided(shape, stride)
