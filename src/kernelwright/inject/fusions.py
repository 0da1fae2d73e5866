"""The places where a model's steps become one kernel.

Every method is one such place: the eager steps, as the model libraries write them, beside the op
that does the same in one pass. Recipes call these; they decide nothing about numerics themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.adaln import ADALN_LAYERNORM, ADALN_RMSNORM
from ..ops.attention import attention
from ..ops.glu import GEGLU, SILU_MUL
from ..ops.layernorm import LAYERNORM
from ..ops.linear import linear_gelu
from ..ops.qk_norm_rope import QK_NORM_ROPE
from ..ops.residual import GATED_RESIDUAL, GATED_RESIDUAL_NORM
from ..ops.rmsnorm import RMSNORM
from ..ops.rope.apply import APPLY_ROPE_QK
from . import norms
from .check import declined, site
from .eight_bits import EightBits
from .norms import Norm
from .prompts import Prompts, Shared
from .slots import hooked
from .tables import Tables

Part = Tensor | None
CHANGES_DTYPE = "eager changes the dtype here"
# such rows at::mean sums in another order; and eager keeps their layout, which the convolutions of
# a VAE want: LTX-Video's decoded 49 frames in 69 ms so, and in 98 with rows made contiguous (H200)
STRIDED = "its rows do not lie side by side in memory"
AT_MEAN = ("diffusers", "transformers")
ROUNDS_BETWEEN = "no kernel rounds between a norm in float32 and what stands beside it"


@dataclass(frozen=True, eq=False)
class Fusions:
    """How the places of one injection are fused: `numerics` and `backend` as `inject` was given
    them, `norms` the kinds of norm found in the model."""

    numerics: str
    backend: str | None
    norms: dict[norms.Key, Norm | str]
    tables: Tables = field(default_factory=Tables)
    eight_bits: EightBits | None = None
    prompts: Prompts = field(default_factory=Prompts)
    masks: Shared = field(default_factory=Shared)
    modulations: Shared = field(default_factory=Shared)
    _seen: dict[nn.Module, Norm | str | None] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> Fusions:
        return self

    @property
    def exact(self) -> bool:
        return self.numerics == "exact"

    def _how(self, x: Tensor, chain: str | None) -> tuple[str | None, str | None]:
        """The exact mode and the backend of an op. On a GPU an exact mode asks for its kernel by
        name, so that an order it does not have is said and not passed over."""
        if self.numerics != "exact":
            return None, self.backend
        if torch.compiler.is_compiling():  # nobody could hear it
            return chain, self.backend
        return chain, self.backend or ("cuda" if x.is_cuda else None)

    # norms

    def norm(self, module: Any, x: Tensor) -> Tensor:
        """A norm by itself: what its module's forward does."""

        def eager() -> Tensor:
            return type(module).forward(module, x)

        read = self._read("norm", module, x, bare=False)
        if read is None:
            return eager()
        norm, weight, bias, eps = read
        if norm.chain in AT_MEAN and x.shape[-1] > 1 and x.stride(-1) != 1:
            declined("norm", STRIDED)
            return eager()
        exact, backend = self._how(x, norm.chain)

        def kernel() -> Tensor:
            if norm.kind == "rms":
                return RMSNORM(x, weight, eps, exact=exact, backend=backend)
            return LAYERNORM(x, weight, bias, eps, exact=exact, backend=backend)

        return site("norm", eager, kernel)

    def norm_modulate(
        self, module: Any, x: Tensor, scale: Part, shift: Part, wide: bool = False
    ) -> Tensor:
        """norm(x) * (1 + scale) + shift; `wide` has all of it in float32, rounded once (Wan)."""

        def eager() -> Tensor:
            y = modulated(module(x.float() if wide else x), scale, shift)
            return y.type_as(x) if wide else y

        name = "norm + modulate"
        read = self._read(name, module, x, scale, shift, wide=wide)
        if read is None:
            return eager()
        norm, weight, bias, eps = read
        rms = norm.kind == "rms"
        if rms and (norm.chain not in ("torch", "diffusers") or wide):
            declined(name, f"no kernel modulates the RMSNorm of {norm.chain}")
            return eager()
        if self.exact and norm.chain == "wan" and not wide:
            declined(name, ROUNDS_BETWEEN)
            return eager()
        exact, backend = self._how(x, norm.chain if rms else "wan" if wide else "diffusers")

        def kernel() -> Tensor:
            if rms:
                return ADALN_RMSNORM(x, weight, scale, shift, eps, exact=exact, backend=backend)
            return ADALN_LAYERNORM(x, weight, scale, shift, bias, eps, exact=exact, backend=backend)

        return site(name, eager, kernel)

    def residual_norm(
        self,
        residual: Tensor,
        x: Tensor,
        module: Any,
        gate: Part = None,
        scale: Part = None,
        shift: Part = None,
        wide: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """total = residual + x * gate; returns norm(total) * (1 + scale) + shift, and total.
        `wide` has the steps in float32, and rounds the total and the result (Wan); a sum without
        a gate is then rounded once either way."""

        def eager() -> tuple[Tensor, Tensor]:
            total = added(residual, x, gate, wide)
            y = modulated(module(total.float() if wide else total), scale, shift)
            return (y.type_as(total) if wide else y), total

        name = "residual + norm" if gate is None else "gate + residual + norm"
        if scale is not None:
            name += " + modulate"
        read = self._read(name, module, residual, gate, scale, shift, x, wide=wide)
        if read is None:
            return eager()
        norm, weight, bias, eps = read
        if x.dtype != residual.dtype:
            declined(name, CHANGES_DTYPE)
            return eager()
        if self.exact and norm.chain == "wan" and not (wide or gate is scale is None):
            declined(name, ROUNDS_BETWEEN)
            return eager()
        exact, backend = self._how(x, "wan" if wide else norm.chain)
        kind = norm.kind

        def kernel() -> tuple[Tensor, Tensor]:
            return GATED_RESIDUAL_NORM(
                residual,
                x,
                gate,
                weight,
                bias,
                scale,
                shift,
                kind,
                eps,
                exact=exact,
                backend=backend,
            )

        return site(name, eager, kernel)

    def residual(
        self, residual: Tensor, x: Tensor, gate: Part = None, wide: bool = False
    ) -> Tensor:
        """residual + x * gate"""

        def eager() -> Tensor:
            return added(residual, x, gate, wide)

        name = "gate + residual"
        if gate is None:
            return eager()  # one addition: nothing to fuse
        if not (wide or gate.dtype == x.dtype) or x.dtype != residual.dtype:
            declined(name, CHANGES_DTYPE)
            return eager()
        exact, backend = self._how(x, "wan" if wide else "diffusers")
        return site(
            name, eager, lambda: GATED_RESIDUAL(residual, x, gate, exact=exact, backend=backend)
        )

    # attention

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
        q_read, k_read = self._read(name, norm_q, query), self._read(name, norm_k, key)
        if q_read is None or k_read is None:
            return _into(out, eager())
        q, q_weight, q_bias, eps = q_read
        k, k_weight, k_bias, k_eps = k_read
        alike = q == k and eps == k_eps and (q_weight is None) == (k_weight is None)
        if q.kind != "rms" or not alike or q_bias is not None or k_bias is not None:
            declined(name, "not one RMSNorm for query and key")
            return _into(out, eager())
        expected = "transformers" if chain == "transformers" else "torch"
        # the RMSNorm of diffusers has no exact kernel for both, only one for each
        each = self.exact and q.chain == "diffusers" and rotary is None and not across_heads
        if self.exact and q.chain != expected and not each:
            declined(name, f"no kernel has the steps of the RMSNorm of {q.chain} before RoPE")
            return _into(out, eager())
        cos, sin = (None, None) if rotary is None else rotary
        if _widens(chain, query, cos):
            declined(name, CHANGES_DTYPE)
            return _into(out, eager())
        exact, backend = self._how(query, q.chain if each else chain)

        def kernel() -> tuple[Tensor, Tensor]:
            if each:
                q_out, k_out = out or (None, None)
                return (
                    RMSNORM(query, q_weight, eps, out=q_out, exact=exact, backend=backend),
                    RMSNORM(key, k_weight, eps, out=k_out, exact=exact, backend=backend),
                )
            return QK_NORM_ROPE(
                query if heads is None else query.unflatten(-1, (heads, -1)),
                key if heads is None else key.unflatten(-1, (heads, -1)),
                q_weight,
                k_weight,
                cos,
                sin,
                eps,
                across_heads,
                layout,
                out=out,
                exact=exact,
                backend=backend,
            )

        return _into(out, site(name, eager, kernel))

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
        )

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Part, processor: Any
    ) -> Tensor:
        """Attention over [batch, tokens, heads, dim], as diffusers' processors call it. A backend
        that the person set, and context parallelism, are theirs to decide."""
        # names, not the module: Dynamo of torch 2.11 cannot import from a package that is lazy
        from diffusers.models.attention_dispatch import (
            AttentionBackendName,
            _AttentionBackendRegistry,
            dispatch_attention_fn,
        )

        chosen = processor._attention_backend, processor._parallel_config

        def eager() -> Tensor:
            return dispatch_attention_fn(
                query, key, value, attn_mask=mask, backend=chosen[0], parallel_config=chosen[1]
            )

        if self.exact or chosen != (None, None) or torch.compiler.is_compiling():
            return eager()
        active = _AttentionBackendRegistry._active_backend
        if active != AttentionBackendName.NATIVE:
            return eager()  # chosen for all models
        if mask is not None and mask.ndim != 4:
            return eager()  # diffusers gives fewer dimensions a meaning of its own
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return site("attention", eager, lambda: attention(q, k, v, mask).transpose(1, 2))

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
            if self.exact or torch.compiler.is_compiling():
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
            return attention(q, k, v, mask).transpose(1, 2)

        if self.exact and not gathered:
            return eager()
        return site("attention", eager, kernel)

    def of_prompt(
        self, owner: Any, text: Tensor, layers: Sequence[Any], make: Callable[[], Any]
    ) -> Any:
        """`make()`, which depends on the text and the weights of these layers alone: once a prompt,
        as long as nothing wants to see the layers being called."""
        if torch.compiler.is_compiling() or any(map(hooked, layers)):
            return make()
        if not all(type(m) is nn.Linear or norms.key(m) in self.norms for m in layers):
            return make()
        if self.eight_bits is not None:
            for layer in layers:
                self.eight_bits.leave(layer, "made once a prompt")
        return self.prompts.once(owner, text, layers, make)

    # feed-forward

    def linear_gelu(self, linear: Any, gelu: Any, x: Tensor) -> Tensor:
        """gelu(linear(x)), with GELU in the epilogue of the product where rounding may change."""

        def eager() -> Tensor:
            return gelu(linear(x))

        plain = type(gelu) is nn.GELU and not hooked_now(gelu) and is_linear(linear)
        eight_bits = self.eight_bits is not None and self.eight_bits.wanted(linear)
        if self.exact or eight_bits or not plain:
            return eager()
        return site(
            "linear + GELU",
            eager,
            lambda: linear_gelu(
                x, linear.weight, linear.bias, approximate=gelu.approximate == "tanh"
            ),
        )

    def feed_forward(self, module: Any, x: Tensor) -> Tensor:
        """diffusers' FeedForward, with GELU in the epilogue of its first product."""

        def eager() -> Tensor:
            return type(module).forward(module, x)

        first = module.net[0]
        if (y := self._eight_bit_feed_forward(module, x)) is not None:
            return y
        if hooked_now(first) or not is_linear(first.proj):
            declined("linear + GELU", "an adapter or a hook is on its first Linear")
            return eager()

        def kernel() -> Tensor:
            y = linear_gelu(
                x, first.proj.weight, first.proj.bias, approximate=first.approximate == "tanh"
            )
            for layer in list(module.net)[1:]:
                y = layer(y)
            return y

        return site("linear + GELU", eager, kernel)

    def _eight_bit_feed_forward(self, module: Any, x: Tensor) -> Tensor | None:
        """The same in eight bits: GELU together with the step to them."""
        if self.eight_bits is None or not self.eight_bits.wanted(module.net[0].proj):
            return None
        first, *between, last = module.net
        rows = first.proj(x)
        y = None
        if not hooked_now(first) and _pass_through(between):
            y = self.eight_bits(last, rows, "gelu_tanh" if first.approximate == "tanh" else "gelu")
        if y is None:
            y = first.gelu(rows)
            for layer in (*between, last):
                y = layer(y)
        return y

    def swiglu_linear(self, linear: Any, activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        """linear(SiLU(gate) * up)"""
        if self.eight_bits is not None and not hooked_now(activation) and gate.shape == up.shape:
            y = self.eight_bits(linear, gate, "silu", up)
            if y is not None:
                return y
        return linear(self.swiglu(activation, gate, up))

    def swiglu(self, activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        """SiLU(gate) * up; `activation` is the model's SiLU."""

        def eager() -> Tensor:
            return activation(gate) * up

        if hooked_now(activation):
            declined("SwiGLU", "a hook wants to see the activation being called")
            return eager()
        if gate.dtype != up.dtype or gate.shape != up.shape:
            declined("SwiGLU", "its two projections are not alike")
            return eager()
        exact, backend = self._how(gate, "torch")
        return site("SwiGLU", eager, lambda: SILU_MUL(gate, up, exact=exact, backend=backend))

    def geglu(self, module: Any, x: Tensor) -> Tensor:
        """diffusers' GEGLU: the second half of a projection activated, times the first."""
        packed = module.proj(x)

        def eager() -> Tensor:
            rows, gate = packed.chunk(2, dim=-1)
            return rows * F.gelu(gate)

        exact, backend = self._how(packed, "torch")
        return site(
            "GEGLU", eager, lambda: GEGLU(packed, False, "second", exact=exact, backend=backend)
        )

    def _read(
        self,
        name: str,
        module: Any,
        x: Tensor,
        *parts: Part,
        wide: bool = False,
        bare: bool = True,
    ) -> tuple[Norm, Part, Part, float] | None:
        """The norm that `module` is, its weight, bias and eps, if a kernel may stand for it."""
        if torch.compiler.is_compiling():
            norm = self.norms.get(norms.key(module))
            weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        else:
            norm = self._seen.get(module)
            if norm is None:
                norm = self._seen[module] = self.norms.get(norms.key(module))
            own = module._parameters
            weight, bias = own.get("weight"), own.get("bias")
            if bare and hooked(module):
                declined(name, "a hook wants to see the norm being called")
                return None
        if not isinstance(norm, Norm):
            declined(name, norm or f"{type(module).__name__} is no norm the kernels know")
            return None
        if not wide:
            dtype = x.dtype
            # a norm that computes in float32 takes weights of any dtype
            if weight is not None and weight.dtype != dtype and norm.chain != "wan":
                declined(name, CHANGES_DTYPE)
                return None
            for part in parts:
                if part is not None and part.dtype != dtype:
                    declined(name, CHANGES_DTYPE)
                    return None
        eps = getattr(module, norm.eps)
        return norm, weight, bias, norms.default_eps(x.dtype, x.device) if eps is None else eps


def _into(out: tuple[Tensor, Tensor] | None, made: tuple[Tensor, Tensor]) -> Any:
    """`made`, in the memory of `out` if there is one."""
    if out is None:
        return made
    return tuple(m if m is o else o.copy_(m) for m, o in zip(made, out, strict=True))


def modulated(x: Tensor, scale: Part, shift: Part) -> Tensor:
    """x * (1 + scale) + shift"""
    if scale is not None:
        x = x * (1 + scale)
    return x if shift is None else x + shift


def added(residual: Tensor, x: Tensor, gate: Part, wide: bool) -> Tensor:
    """residual + x * gate"""
    if gate is None:
        return residual + x
    branch = x * gate
    return (residual.float() + branch).type_as(residual) if wide else residual + branch


def _widens(chain: str, x: Tensor, table: Part) -> bool:
    """Whether RoPE in the dtypes of its operands, as transformers has it, ends in a wider one."""
    return chain == "transformers" and table is not None and table.dtype != x.dtype


def _pass_through(layers: list[Any]) -> bool:
    """Whether these layers hand on what they are given."""
    return all(type(m) is nn.Dropout and not (m.training and m.p) for m in layers)


def is_linear(module: Any) -> bool:
    """A plain Linear that may be read around: no adapter, no hook, no quantised weight."""
    return (
        type(module) is nn.Linear and type(module.weight) is nn.Parameter and not hooked_now(module)
    )


def hooked_now(module: nn.Module) -> bool:
    return not torch.compiler.is_compiling() and hooked(module)
