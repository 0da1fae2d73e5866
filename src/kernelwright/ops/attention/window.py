"""Causal attention in a window: a query sees itself and so many keys before it.

By PyTorch's flash attention, which skips what is outside of the window, where other kernels read a
mask of all pairs and compute all of them. F.scaled_dot_product_attention cannot be told a window:
whether the function under it does what is said here is tried once before it is used.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from . import limits
from .choice import request_of

# what is tried: tokens of several tiles, and a window that ends inside of one
TOKENS, WINDOW = 300, 40
# a window that is off by one is off by 1 / sqrt(WINDOW), 16%; 16-bit numbers by less than 1%
LIMIT = 0.03


def seen(queries: Tensor, keys: Tensor, window: int | Tensor) -> Tensor:
    """Which positions of keys a position of a query sees, [queries, keys]."""
    row, column = queries[:, None], keys[None]
    return (column <= row) & (column > row - window)


def why_not(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why these [batch, heads, tokens, dim] cannot be attended in a window, or None. Where they
    begin in memory is left to `attend`."""
    if query.ndim != 4 or query.shape[2] != key.shape[2]:
        return "it needs as many queries as keys"
    request = request_of(query, key, value, None, True)._replace(aligned=True)
    if (why := limits.problem("flash", request)) is not None:
        return why
    if "flash" in request.disabled:
        return "it is turned off in torch.backends.cuda"
    if query.shape[3] % 8:
        return "it needs head_dim to be a multiple of 8"
    return None if _is_right(query.device, query.dtype, query.shape[3]) else "it has no windows"


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int
) -> Tensor | None:
    """softmax(query @ key^T * scale) @ value over the last `window` keys up to each query's own;
    None if the kernel cannot read these."""
    request = request_of(query, key, value, None, True)
    if not request.aligned or "flash" in request.disabled:
        return None
    return flash(query, key, value, scale, window)


def flash(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int) -> Tensor:
    """The kernel, which takes tokens before heads."""
    tokens = query.shape[2]
    by_tokens = (t.transpose(1, 2) for t in (query, key, value))
    out, *_ = torch.ops.aten._flash_attention_forward.default(
        *(*by_tokens, None, None, tokens, tokens, 0.0, True, False),
        scale=scale,
        window_size_left=window - 1,
        window_size_right=0,
    )
    return out.transpose(1, 2)


@functools.lru_cache
def _is_right(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether the kernel gives what a mask gives, with heads that share keys."""
    drawn = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, TOKENS, dim, device=device, dtype=dtype, generator=drawn)
        for heads in (4, 2, 2)
    )
    place = torch.arange(TOKENS, device=device)
    mask = seen(place, place, WINDOW)
    with torch.no_grad():
        wide = query.float(), key.float(), value.float()
        expected = F.scaled_dot_product_attention(wide[0], wide[1], wide[2], mask, enable_gqa=True)
        try:
            got = flash(query, key, value, None, WINDOW)
        except RuntimeError:  # a build without windows
            return False
        return bool((got.float() - expected).norm() <= LIMIT * expected.norm())
