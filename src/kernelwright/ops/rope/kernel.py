"""The rotary kernel: RMSNorm and rotation of query and key in one launch, either part absent.

`apply_rope`, the grid ropes and `qk_norm_rope` are this kernel with parts left out; the formula is
in one place for Triton (`triton.py`) and in one for CUDA (`cuda.cuh`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .call import PARTS, RopeCall, merge_heads

if TYPE_CHECKING:
    from ...backends import Launch
    from ..plan import Call


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
        names = tuple(getattr(self, part) for part in PARTS)
        tensors = {p: call[n] if n else None for p, n in zip(PARTS, names, strict=True)}
        across = bool(call.get("across_heads", False))
        query = tensors["query"]
        rotation = query.shape[-1]
        if across and query.ndim == 4:
            heads = query.shape[2] * query.shape[3]
            cos = tensors["cos"]
            if cos is not None and cos.shape[-1] in (heads, heads // 2) and cos.ndim < 4:
                rotation = heads
            for part in ("query", "key", "q_out", "k_out"):
                t = tensors[part]
                tensors[part] = None if t is None else merge_heads(t, part)
        return RopeCall(
            tensors, names, self.norm, rotation, call["layout"], float(call.get("eps", 0.0))
        )
