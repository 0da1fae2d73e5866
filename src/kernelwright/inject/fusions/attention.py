"""What stands around attention, and the attention itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...library_internals import active_attention_backend, processor_choices
from ...ops import selection
from ...ops.attention import attention
from ...ops.linear import algorithms
from ...ops.qk_norm_rope import QK_NORM_ROPE
from ...ops.residual import GATED_RESIDUAL
from ...ops.rmsnorm import RMSNORM
from ...ops.rope.apply import APPLY_ROPE_QK
from ..reuse.rope_tables import QK_NORM_ROPE_KEPT
from ..runtime.sites import declined, site
from ..state.switches import torch_attends
from .base import CHANGES_DTYPE, Part, Places, is_linear


class QkNorms(NamedTuple):
    """What a kernel for the norms of query and key is given; `each`: it is one for each."""

    q_weight: Part
    k_weight: Part
    eps: float
    exact: str | None
    backend: str | None
    each: bool


class AttentionPlaces(Places):
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
        """rotate(norm_q(query)), rotate(norm_k(key)). `rotate` is the model's own function, and
        `rotary` its tables; `chain` the eager steps, as `qk_norm_rope` of the ops names them.
        `heads`: `rotate` parts each token into so many, whose width the tables have (Wan).
        `out` are tensors to write into."""

        def eager() -> tuple[Tensor, Tensor]:
            return rotate(norm_q(query)), rotate(norm_k(key))

        name = "QK-norm + RoPE" if rotary is not None else "QK-norm"
        how = self.qk_norms(name, query, key, norm_q, norm_k, rotary, across_heads, chain)
        if how is None:
            return _into(out, eager())
        cos, sin = (None, None) if rotary is None else rotary
        q_weight, k_weight, eps, exact, backend, each = how

        def kernel() -> tuple[Tensor, Tensor]:
            if each:
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
            if torch.compiler.is_compiling() and cos is not None and not _recorded(*operands[:6]):
                return QK_NORM_ROPE_KEPT(*operands, exact or "", backend or selection.traced())
            return QK_NORM_ROPE(*operands, out=out, exact=exact, backend=backend)

        return _into(out, site(name, eager, kernel, query, key))

    def qk_norms(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        norm_q: Any,
        norm_k: Any,
        rotary: tuple[Tensor, Tensor] | None,
        across_heads: bool = False,
        chain: str = "diffusers",
    ) -> QkNorms | None:
        """How a kernel may stand for the norms of query and key, and the rotation behind them."""
        q_read, k_read = self._read(name, norm_q, query), self._read(name, norm_k, key)
        if q_read is None or k_read is None:
            return None
        q, q_weight, q_bias, eps = q_read
        k, k_weight, k_bias, k_eps = k_read
        alike = q == k and eps == k_eps and (q_weight is None) == (k_weight is None)
        if q.kind != "rms" or not alike or q_bias is not None or k_bias is not None:
            declined(name, "not one RMSNorm for query and key")
            return None
        expected = "transformers" if chain == "transformers" else "torch"
        # the RMSNorm of diffusers has no exact kernel for both, only one for each
        each = self.exact and q.chain == "diffusers" and rotary is None and not across_heads
        if self.exact and q.chain != expected and not each:
            declined(name, f"no kernel has the steps of the RMSNorm of {q.chain} before RoPE")
            return None
        if rotary is not None and _widens(chain, query, rotary[0]):
            declined(name, CHANGES_DTYPE)
            return None
        exact, backend = self._how(query, q.chain if each else chain)
        return QkNorms(q_weight, k_weight, eps, exact, backend, each)

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
        if _widens(chain, query, cos):
            declined("RoPE", CHANGES_DTYPE)
            return eager()
        exact, backend = self._how(query, chain)
        return site(
            "RoPE",
            eager,
            lambda: APPLY_ROPE_QK(query, key, cos, sin, layout, exact=exact, backend=backend),
            query,
            key,
        )

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Part, processor: Any
    ) -> Tensor:
        """Attention over [batch, tokens, heads, dim], as diffusers' processors call it. A backend
        that the person set, and context parallelism, are theirs to decide."""
        # names, not the module: Dynamo of torch 2.11 cannot import from a package that is lazy
        from diffusers.models.attention_dispatch import (
            AttentionBackendName,
            dispatch_attention_fn,
        )

        chosen = processor_choices(processor)

        def eager() -> Tensor:
            return dispatch_attention_fn(
                query, key, value, attn_mask=mask, backend=chosen[0], parallel_config=chosen[1]
            )

        if self.exact or chosen != (None, None) or torch.compiler.is_compiling():
            return eager()
        if not torch_attends():
            return eager()  # somebody has put another function in the place of PyTorch's
        if active_attention_backend() != AttentionBackendName.NATIVE:
            return eager()  # chosen for all models
        if mask is not None and mask.ndim != 4:
            return eager()  # diffusers gives fewer dimensions a meaning of its own
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return site("attention", eager, lambda: attention(q, k, v, mask).transpose(1, 2), q, k, v)

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Part = None,
        gathered: bool = False,
    ) -> Tensor:
        """F.scaled_dot_product_attention over [batch, tokens, heads, dim], read where they lie.
        `gathered`: the model joins streams of tokens for it, and so copies the heads apart."""
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))

        def eager() -> Tensor:
            a, b, c = (t.contiguous() if gathered else t for t in (q, k, v))
            return F.scaled_dot_product_attention(a, b, c, attn_mask=mask).transpose(1, 2)

        def kernel() -> Tensor:
            if self.exact or torch.compiler.is_compiling() or not torch_attends():
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
            return attention(q, k, v, mask).transpose(1, 2)

        if self.exact and not gathered:
            return eager()
        return site("attention", eager, kernel, q, k, v)

    def of_first(self, linear: Any, rows: Tensor, tokens: int) -> Tensor:
        """linear(rows[:, :tokens]). PyTorch copies such a part of a batch together, and adds the
        bias in a pass of its own; here all rows go through one product, and a part is taken of it.
        Copy and bias took 39 us of a block of SD3.5 (1024 x 1024, batch 2) on an H200."""
        part = rows[:, :tokens]

        def eager() -> Tensor:
            return linear(part)

        in_fp8 = self.fp8_layers is not None and self.fp8_layers.wanted(linear)
        mixed = torch.is_autocast_enabled(rows.device.type)
        if in_fp8 or mixed or part.is_contiguous() or not is_linear(linear):
            return eager()
        if linear.bias is None or linear.weight.dtype != rows.dtype or 2 * tokens < rows.shape[1]:
            return eager()

        exact, backend = self._how(rows, "diffusers")

        def kernel() -> Tensor:
            if self.exact:  # eager rounds before it adds the bias
                y = algorithms.linear(rows, linear.weight)[:, :tokens]
                # PyTorch's addition reads such rows element by element
                return GATED_RESIDUAL(
                    y, linear.bias.expand_as(y), None, exact=exact, backend=backend
                )
            return algorithms.linear(rows, linear.weight, linear.bias)[:, :tokens]

        return site("product of a part of the rows", eager, kernel, rows)


def _into(out: tuple[Tensor, Tensor] | None, made: tuple[Tensor, Tensor]) -> Any:
    """`made`, in the memory of `out` if there is one."""
    if out is None:
        return made
    return tuple(m if m is o else o.copy_(m) for m, o in zip(made, out, strict=True))


def _recorded(*tensors: Part) -> bool:
    """Whether autograd records what is done to these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _widens(chain: str, x: Tensor, table: Part) -> bool:
    """Whether RoPE in the dtypes of its operands, as transformers has it, ends in a wider one."""
    return chain == "transformers" and table is not None and table.dtype != x.dtype
