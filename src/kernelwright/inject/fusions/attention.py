"""Attention, and the projection after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from ...backends.torch_internals import attention_choice
from ...fuser import attention_by_lengths
from ...fuser.attention_by_lengths import Lengths
from ...library_internals import active_attention_backend, processor_choices
from ...ops.attention import attention, window
from ...ops.linear import algorithms
from ...ops.residual import GATED_RESIDUAL
from ..reuse.masks import lengths_of, numbers_of
from ..reuse.packed_weights import why_not_now
from ..runtime.sites import declined, eagerly, equal, mode, site
from ..state.switches import torch_attends
from . import all_scores
from .base import Part, is_linear
from .query_key import QueryKeyFusions, needs_grad

# the module of transformers' function that calls F.scaled_dot_product_attention
SDPA = "transformers.integrations.sdpa_attention"
SHARED_HEADS = "heads that share keys and values"
# bounds memory where layouts never repeat: start over
LAYOUTS = 1024
# kernels of PyTorch's attention that read keys and values in place if query heads share them
READ_SHARED_HEADS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


class AttentionFusions(QueryKeyFusions):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.programs.attend = self.attend_over_cache

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Part, processor: Any
    ) -> Tensor:
        """Attention over [batch, tokens, heads, dim], as diffusers' processors call it. A backend
        or context parallelism that the user has set is left alone."""
        # by full name: Dynamo of torch 2.11 cannot import from a lazy package
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
            return eager()  # F.scaled_dot_product_attention was patched
        if active_attention_backend() != AttentionBackendName.NATIVE:
            return eager()  # another backend is set for all models
        if mask is not None and mask.ndim != 4:
            return eager()  # diffusers interprets masks of fewer dimensions differently
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return site("attention", eager, lambda: self._attend(q, k, v, mask), q, k, v)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Part, causal: bool = False
    ) -> Tensor:
        """Attention over [batch, heads, tokens, dim] by the fastest kernel of the tier, as [batch,
        tokens, heads, dim]."""

        def in_16_bits() -> Tensor:
            return attention(query, key, value, mask, causal=causal)

        y = None
        if self.fp8_layers is not None and mask is None and not causal:
            y = self.fp8_layers.attention(query, key, value, in_16_bits)
        return (in_16_bits() if y is None else y).transpose(1, 2)

    def _lengths(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Lengths | None:
        """The lengths or the window that a mask says, or None: it says more, or `exact` needs the
        bits of attention with the mask."""
        queries, keys = query.shape[2], key.shape[2]
        if self.exact or queries < all_scores.MIN_QUERIES or not torch_attends():
            return None
        windows = window.why_not(query, key, value) is None
        said = lengths_of(self.masks, mask, queries, keys, windows)
        return said if isinstance(said, Lengths) else None

    def _by_lengths(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        scale: float,
        lengths: Lengths,
    ) -> Tensor:
        """Attention over [batch, heads, tokens, dim] without its mask, as [batch, tokens, heads,
        dim]."""

        def by(
            q: Tensor, k: Tensor, v: Tensor, mask: Part, dropout: float, causal: bool, *_: Any
        ) -> Tensor:
            return attention(q, k, v, mask, scale, causal)

        batch, heads, tokens, _ = query.shape
        rows = torch.empty(batch, tokens, heads, value.shape[3], device="meta")
        y = attention_by_lengths.attend(
            query,
            key,
            value,
            mask,
            dropout=0.0,
            causal=False,
            scale=scale,
            grouped=True,
            backends=(),
            lengths=lengths,
            like=rows.transpose(1, 2),
            by=by,
        )
        return y.transpose(1, 2)

    def _is_causal(self, mask: Tensor, queries: int, keys: int) -> bool:
        """Whether a mask only says that a row sees the keys up to its own."""
        said = lengths_of(self.masks, mask, queries, keys) if queries == keys else None
        return isinstance(said, Lengths) and said.causal

    def attend_grouped(
        self,
        attend: Callable[[Part], Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Part,
        scale: float,
    ) -> Any:
        """attend(mask) as transformers calls PyTorch's attention. With a mask it copies keys and
        values for every head of queries that shares them; kernels that read them in place are
        used without the copies."""
        if mode.eager or mask is None or torch.compiler.is_compiling():
            return attend(mask)
        if (lengths := self._lengths(query, key, value, mask)) is not None:
            return site(
                "attention by lengths",
                lambda: attend(mask),
                lambda: (self._by_lengths(query, key, value, mask, scale, lengths), None),
                *(query, key, value),
            )
        shared = query.shape[1] // key.shape[1] > 1 and torch_attends()
        choice = attention_choice(query, key, value, mask, scale) if shared else None
        if choice not in READ_SHARED_HEADS:
            return self._attend_masked(attend, query, key, value, mask, scale)

        def kernel() -> tuple[Tensor, None]:
            numbers = self._mask_numbers(choice, query, mask)
            rows = F.scaled_dot_product_attention(
                *(query, key, value, mask if numbers is None else numbers),
                scale=scale,
                enable_gqa=True,
            )
            return rows.transpose(1, 2).contiguous(), None

        # a verdict of a module is for any length of the cache, but cuDNN's kernel is not
        if self.exact and not self._has_eagers_bits(
            (choice, *map(_layout, (query, key, value, mask)), scale),
            kernel,
            lambda: attend(mask),
            query.device,
        ):
            declined(SHARED_HEADS, "the kernel that reads them in place has other bits here")
            return self._attend_masked(attend, query, key, value, mask, scale)
        return site(
            SHARED_HEADS,
            lambda: self._attend_masked(attend, query, key, value, mask, scale),
            kernel,
            *(query, key, value),
        )

    def attend_over_cache(
        self,
        function: Callable[..., Any],
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Part,
        kwargs: dict[str, Any],
    ) -> Any:
        """An attention function of transformers with the keys and values of a cache."""

        def attended(mask: Part) -> Any:
            return function(module, query, key, value, mask, **kwargs)

        scale = kwargs.get("scaling")
        biased = kwargs.get("position_bias") is not None
        if getattr(function, "__module__", None) != SDPA or scale is None or biased:
            return attended(mask)
        return self.attend_grouped(attended, query, key, value, mask, scale)

    def _has_eagers_bits(
        self,
        layouts: Any,
        kernel: Callable[[], Any],
        eager: Callable[[], Any],
        device: torch.device,
    ) -> bool:
        """Whether attention has eager's bits for these layouts: compared at first sight of a
        module, and whenever they are new. During a capture nothing can be compared."""
        known = self.attention_layouts.get(layouts)
        if (known is None or mode.notes is not None) and why_not_now(device) is None:
            with eagerly(), torch.no_grad():
                known = equal(kernel(), eager())
            if len(self.attention_layouts) >= LAYOUTS:
                self.attention_layouts.clear()
            self.attention_layouts[layouts] = known
        return bool(known)

    def _attend_masked(
        self,
        attend: Callable[[Part], Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        scale: float,
    ) -> Any:
        """attend(mask), with the numbers of the mask computed once for all layers of a forward."""
        if mode.eager:  # in the eager steps of a comparison
            return attend(mask)
        heads = query.shape[1]
        key, value = (
            t if t.shape[1] == heads else t[:, :1].expand(-1, heads, -1, -1) for t in (key, value)
        )
        choice = attention_choice(query, key, value, mask, scale)
        numbers = self._mask_numbers(choice, query, mask)
        if numbers is None:
            return attend(mask)
        return site("mask made once", lambda: attend(mask), lambda: attend(numbers), query)

    def _mask_numbers(self, choice: SDPBackend, query: Tensor, mask: Tensor) -> Part:
        return numbers_of(self.masks, choice, query, mask)

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Part = None,
        gathered: bool = False,
    ) -> Tensor:
        """F.scaled_dot_product_attention over [batch, tokens, heads, dim], without copies.
        `gathered`: eager concatenates streams of tokens per head, and so has contiguous heads."""
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))

        def eager() -> Tensor:
            a, b, c = (t.contiguous() if gathered else t for t in (q, k, v))
            return F.scaled_dot_product_attention(a, b, c, attn_mask=mask).transpose(1, 2)

        def kernel() -> Tensor:
            if self.exact or torch.compiler.is_compiling() or not torch_attends():
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
            return self._attend(q, k, v, mask)

        if self.exact and not gathered:
            return eager()
        return site("attention", eager, kernel, q, k, v)

    def sdpa_of_shared_keys(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Part, causal: bool
    ) -> Tensor:
        """F.scaled_dot_product_attention over [batch, heads, tokens, dim], which is not told that
        heads share keys: then PyTorch computes all scores."""

        def eager() -> Tensor:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal
            )

        # with few queries the score matrix is small
        if torch.compiler.is_compiling() or query.shape[2] < all_scores.MIN_QUERIES:
            return eager()
        if mode.eager or not torch_attends() or torch.is_autocast_enabled(query.device.type):
            return eager()
        operands = query, key, value
        if not self.exact:
            known = mask is not None and self._is_causal(mask, query.shape[2], key.shape[2])
            sees = (None, True) if known else (mask, causal)
            return site(
                "attention",
                eager,
                lambda: self._attend(*operands, *sees).transpose(1, 2),
                *operands,
            )
        if mask is None or causal or needs_grad(*operands, mask):
            return eager()
        if attention_choice(*operands, mask, None, grouped=False) != SDPBackend.MATH:
            return eager()
        if (why := all_scores.why_not(*operands, mask)) is not None:
            declined("attention with all scores", why)
            return eager()
        return site(
            "attention with all scores",
            eager,
            lambda: all_scores.attend(query, key, value, mask),
            *operands,
        )

    def linear_of_first_tokens(self, linear: Any, rows: Tensor, tokens: int) -> Tensor:
        """linear(rows[:, :tokens]). PyTorch makes such a slice contiguous, and adds the bias in a
        pass of its own; here one GEMM runs over all rows, and its result is sliced. Copy and bias
        took 39 us of a block of SD3.5 (1024 x 1024, batch 2) on an H200."""
        part = rows[:, :tokens]

        def eager() -> Tensor:
            return linear(part)

        in_fp8 = self.fp8_layers is not None and self.fp8_layers.wanted(linear)
        mixed = torch.is_autocast_enabled(rows.device.type)
        if in_fp8 or mixed or part.is_contiguous() or not is_linear(linear):
            return eager()
        if linear.bias is None or linear.weight.dtype != rows.dtype or 2 * tokens < rows.shape[1]:
            return eager()
        if not torch.compiler.is_compiling() and not self.at_hand(linear):
            return eager()

        exact, backend = self._exact_and_backend(rows, "diffusers")

        def kernel() -> Tensor:
            if self.exact:  # eager rounds before it adds the bias
                y = algorithms.linear(rows, linear.weight)[:, :tokens]
                # PyTorch's addition does not vectorise over strided rows
                return GATED_RESIDUAL(
                    y, linear.bias.expand_as(y), None, exact=exact, backend=backend
                )
            return algorithms.linear(rows, linear.weight, linear.bias)[:, :tokens]

        return site("product of a part of the rows", eager, kernel, rows)


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device
