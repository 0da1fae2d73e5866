"""Query and key before attention: their norms and RoPE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops import selection
from ...ops.qk_norm_rope import QK_NORM_ROPE
from ...ops.rmsnorm import RMSNORM
from ...ops.rope.apply import APPLY_ROPE_QK
from ..reuse.rope_tables import QK_NORM_ROPE_KEPT
from ..runtime.sites import declined, site
from .base import CHANGES_DTYPE, BaseFusions, Part


class QkNormOperands(NamedTuple):
    """Arguments for the norm of query and key; `separate`: one launch for each of the two."""

    q_weight: Part
    k_weight: Part
    eps: float
    exact: str | None
    backend: str | None
    separate: bool


class QueryKeyFusions(BaseFusions):
    def qk_norm_rope(
        self,
        query: Tensor,
        key: Tensor,
        norm_q: Any,
        norm_k: Any,
        rotary: tuple[Tensor, Tensor] | None,
        rotate: Callable[[Tensor], Tensor],
        *,
        across_heads: bool = False,
        heads: int | None = None,
        layout: str = "interleaved",
        chain: str = "diffusers",
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """rotate(norm_q(query)), rotate(norm_k(key)). `rotate` is the model's own function with the
        tables `rotary`; `chain` names the eager steps, as in the op `qk_norm_rope`. `heads`:
        `rotate` splits each token into this many, and the tables have the width of one (Wan).
        `out` are tensors to write into."""

        def eager() -> tuple[Tensor, Tensor]:
            return rotate(norm_q(query)), rotate(norm_k(key))

        name = "QK-norm + RoPE" if rotary is not None else "QK-norm"
        how = self.qk_norm_operands(name, query, key, norm_q, norm_k, rotary, across_heads, chain)
        if how is None:
            return _into(out, eager())
        cos, sin = (None, None) if rotary is None else rotary
        q_weight, k_weight, eps, exact, backend, separate = how

        def kernel() -> tuple[Tensor, Tensor]:
            if separate:
                q_out, k_out = out or (None, None)
                return (
                    RMSNORM(query, q_weight, eps, out=q_out, exact=exact, backend=backend),
                    RMSNORM(key, k_weight, eps, out=k_out, exact=exact, backend=backend),
                )
            operands = (
                query if heads is None else query.unflatten(-1, (heads, -1)),
                key if heads is None else key.unflatten(-1, (heads, -1)),
                q_weight,
                k_weight,
                cos,
                sin,
                eps,
                across_heads,
                layout,
            )
            if torch.compiler.is_compiling() and cos is not None and not needs_grad(*operands[:6]):
                return QK_NORM_ROPE_KEPT(*operands, exact or "", backend or selection.traced())
            return QK_NORM_ROPE(*operands, out=out, exact=exact, backend=backend)

        return _into(out, site(name, eager, kernel, query, key))

    def qk_norm_operands(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        norm_q: Any,
        norm_k: Any,
        rotary: tuple[Tensor, Tensor] | None,
        across_heads: bool = False,
        chain: str = "diffusers",
    ) -> QkNormOperands | None:
        """Arguments of the kernel for both norms and the RoPE after them; None if there is none."""
        q_read, k_read = (
            self._norm_operands(name, norm_q, query),
            self._norm_operands(name, norm_k, key),
        )
        if q_read is None or k_read is None:
            return None
        q, q_weight, q_bias, eps = q_read
        k, k_weight, k_bias, k_eps = k_read
        alike = q == k and eps == k_eps and (q_weight is None) == (k_weight is None)
        if q.kind != "rms" or not alike or q_bias is not None or k_bias is not None:
            declined(name, "query and key need RMSNorms of one kind, without bias")
            return None
        expected = "transformers" if chain == "transformers" else "torch"
        # exact mode has no kernel that does diffusers' RMSNorm for both query and key
        separate = self.exact and q.chain == "diffusers" and rotary is None and not across_heads
        if self.exact and q.chain != expected and not separate:
            declined(name, f"no exact kernel for the RMSNorm of {q.chain} before RoPE")
            return None
        if rotary is not None and promotes_dtype(chain, query, rotary[0]):
            declined(name, CHANGES_DTYPE)
            return None
        exact, backend = self._exact_and_backend(query, q.chain if separate else chain)
        return QkNormOperands(q_weight, k_weight, eps, exact, backend, separate)

    def rope(
        self,
        query: Tensor,
        key: Tensor,
        rotary: tuple[Tensor, Tensor],
        rotate: Callable[[Tensor], Tensor],
        *,
        layout: str,
        chain: str,
    ) -> tuple[Tensor, Tensor]:
        """rotate(query), rotate(key)"""

        def eager() -> tuple[Tensor, Tensor]:
            return rotate(query), rotate(key)

        cos, sin = rotary
        if promotes_dtype(chain, query, cos):
            declined("RoPE", CHANGES_DTYPE)
            return eager()
        exact, backend = self._exact_and_backend(query, chain)
        return site(
            "RoPE",
            eager,
            lambda: APPLY_ROPE_QK(query, key, cos, sin, layout, exact=exact, backend=backend),
            query,
            key,
        )


def _into(out: tuple[Tensor, Tensor] | None, made: tuple[Tensor, Tensor]) -> Any:
    """`made`, copied into `out` if that is given."""
    if out is None:
        return made
    return tuple(m if m is o else o.copy_(m) for m, o in zip(made, out, strict=True))


def needs_grad(*tensors: Part) -> bool:
    """Whether autograd records operations on these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def promotes_dtype(chain: str, x: Tensor, table: Part) -> bool:
    """Whether RoPE as transformers writes it, in the dtypes of its operands, widens the result."""
    return chain == "transformers" and table is not None and table.dtype != x.dtype
