"""Decoding into a static cache: RoPE, and the update of the cache, as one kernel.

A cache is state, and an update must not run twice. So the kernel is tried on copies of a layer's
cache, once for each layout: in `exact` its results, and all of what is in the copies then, are
compared with those of the model's own steps.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...backends.user_warnings import warn
from ...library_internals import static_cache_layer
from ...ops.rope_into_cache import ROPE_INTO_CACHE
from ..identify.source import fingerprint
from ..reuse.packed_weights import why_not_now
from ..runtime.informative import Uninformative
from ..runtime.sites import NO_MEMORY, declined, mode, set_mode, site
from .attention import AttentionFusions
from .base import CHANGES_DTYPE, Part
from .query_key import needs_grad, promotes_dtype

# the code of `update` that the kernel replaces: StaticLayer's, and that of the cache around it, of
# transformers 5.17 and of 5.20 to 5.22
UPDATES = ("1125c3ed1d1c", "b3e5daabe23d", "834cce026460")
# more are a part of a prompt
MOST_TOKENS = 16
SITE = "RoPE into a static cache"
# bounds memory where layouts never repeat: start over
LAYOUTS = 1024

Heads = tuple[Tensor, Tensor, Tensor]
Norms = tuple[Any, Any]


class _State(NamedTuple):
    """What an update writes to."""

    keys: Tensor
    values: Tensor
    length: Tensor

    def copied(self) -> _State:
        return _State(*(t.clone() for t in self))


class StaticCacheFusions(AttentionFusions):
    def rope_into_cache(
        self,
        cache: Any,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        norms: Norms | None,
        rotary: tuple[Tensor, Tensor],
        rotate: Callable[[Tensor], Tensor],
        *,
        layout: str,
        chain: str,
    ) -> Heads | None:
        """rotate(query), and the cache's keys and values after its update with rotate(key) and
        value: all [batch, heads, positions, dim], from [batch, tokens, heads, dim]. `norms` are
        those of query and key before the rotation. None, with nothing written, where one kernel
        cannot do that, or may not."""
        if torch.compiler.is_compiling() or query.shape[1] > MOST_TOKENS:
            return None
        if mode.off and SITE in mode.off:
            return None
        layer = static_cache_layer(cache, index)
        if layer is None or not (_is_known(cache) and _is_known(layer)):
            return None
        state = _State(layer.keys, layer.values, layer.cumulative_length)
        if not _fits(state, query, key, value) or self.backend not in (None, "cuda"):
            return None
        if promotes_dtype(chain, query, rotary[0]):
            declined(SITE, CHANGES_DTYPE)
            return None
        weights: tuple[Part, Part] = None, None
        eps = 0.0
        if norms is None:
            exact, backend = self._exact_and_backend(query, chain)
        else:
            how = self.qk_norm_operands(SITE, query, key, *norms, rotary, chain=chain)
            if how is None or how.q_weight is None:  # without weights the op normalises nothing
                return None
            weights, eps = (how.q_weight, how.k_weight), how.eps
            exact, backend = how.exact, how.backend
        if needs_grad(query, key, value, *weights):
            return None
        if query.is_cuda:
            backend = "cuda"  # by name: it raises where it has no kernel, and does not fall back

        def kernel(state: _State) -> Tensor:
            operands = (query, key, value, *weights, *rotary, *state, eps, layout)
            return ROPE_INTO_CACHE(*operands, exact=exact, backend=backend)

        def eager(state: _State) -> Tensor:
            q, k = query, key
            if norms is not None:
                q, k = norms[0](q), norms[1](k)
            twin = copy.copy(layer)
            twin.keys, twin.values, twin.cumulative_length = state
            twin.update(rotate(k).transpose(1, 2), value.transpose(1, 2))
            return rotate(q)

        cos = rotary[0]
        rows = query.shape, query.stride(), key.stride(), value.stride(), query.dtype, query.device
        layouts = *rows, cos.shape, cos.stride(), state.keys.shape, norms is None
        usable = None if mode.comparing else self.cache_layouts.get(layouts)
        if usable is None:
            usable = self._try(layouts, kernel, eager, state, query, key)
        elif usable and mode.notes is not None:
            mode.notes[SITE, "fused"] += 1
        if not usable:
            return None
        return kernel(state).transpose(1, 2), state.keys, state.values

    def _try(
        self,
        layouts: Any,
        kernel: Callable[[_State], Tensor],
        eager: Callable[[_State], Tensor],
        state: _State,
        *operands: Tensor,
    ) -> bool:
        """Run the kernel on a copy of the cache, in `exact` beside the eager steps on another.
        Returns whether to use it now; what that proves is kept for these layouts."""
        if why_not_now(operands[0].device):
            return False
        try:
            copied = state.copied()
        except torch.OutOfMemoryError:
            declined(SITE, NO_MEMORY)
            return False

        def expected() -> tuple[Tensor, ...]:
            own = state.copied()
            return eager(own), *own

        def found() -> tuple[Tensor, ...]:
            return kernel(copied), *copied

        noting = mode.notes is not None
        fields: dict[str, Any] = {"comparing": self.exact}
        if not noting:
            fields |= {"notes": Counter(), "off": {}, "uninformative": Uninformative()}
        with set_mode(**fields):
            site(SITE, expected, found, *operands)
            why = mode.off.get(SITE)
            proves_nothing = mode.uninformative is not None and SITE in mode.uninformative
        if why is not None and not noting:
            warn(f"{SITE}: {why}; that stays eager")
        if not proves_nothing:
            if len(self.cache_layouts) >= LAYOUTS:
                self.cache_layouts.clear()
            self.cache_layouts[layouts] = why is None
        return why is None


def _is_known(owner: Any) -> bool:
    """Whether its class has the `update` that the kernel was written for, and nothing around it."""
    update = type(owner).update
    return "__wrapped__" not in vars(update) and fingerprint(update) in UPDATES


def _fits(state: _State, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether rows and cache are plain tensors that belong together."""
    batch, tokens, heads, dim = key.shape
    keys, values, length = state
    return (
        all(type(t) is Tensor for t in (query, key, value, *state))
        and keys.dtype == values.dtype == query.dtype == key.dtype == value.dtype
        and keys.device == values.device == length.device == query.device
        and length.ndim == 0
        and length.dtype == torch.int64
        and keys.shape == (batch, heads, keys.shape[2], dim)
        and values.shape == (batch, heads, keys.shape[2], value.shape[3])
        and keys.shape[2] >= tokens
        and keys.is_contiguous()
        and values.is_contiguous()
        and not any(t.requires_grad for t in state)
    )
