"""A float32 run of a 16-bit module, in little additional memory.

Each weight is widened when it is read, and freed when the layer that read it is done; attention is
computed a few heads at a time, so that its scores are never all in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...backends.torch_internals import pytree

SCORES = 2**25  # attention scores at a time: 128 MiB, and as much again for their softmax


class Float32Run:
    """Runs the forward `eager` of a module in float32, inputs and weights."""

    def __init__(self, module: nn.Module, eager: Callable[..., Any], device: str) -> None:
        self.module, self.eager, self.device = module, eager, device
        self.twin = _twin(module)

    def __call__(self, args: Any, kwargs: Any) -> Any:
        args, kwargs = widened((args, kwargs))
        with ChunkedAttention(), torch.autocast(self.device, enabled=False):
            return self.eager(self.twin, *args, **kwargs)


def widened(tree: Any) -> Any:
    """A tree with every floating-point tensor in float32."""
    return pytree.tree_map(_wide, tree)


def _wide(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.float() if is_float else value


def _twin(module: nn.Module) -> nn.Module:
    """A copy of a module that shares its weights, and reads them as float32."""
    memo: dict[int, Any] = {id(p): p for p in module.parameters()}
    for buffer in module.buffers():  # copied, because a forward may write to these
        if buffer.is_floating_point():
            memo[id(buffer)] = buffer.detach().to(torch.float32, copy=True)
    twin = copy.deepcopy(module, memo)
    for part in twin.modules():
        part._parameters = Float32Parameters(part._parameters)
    return twin


class Float32Parameters(dict[str, Any]):
    """The parameters of a module, each widened to float32 whenever it is read."""

    def __getitem__(self, name: str) -> Any:
        return _wide(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return _wide(super().get(name, default))

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return (self[name] for name in self)

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((name, self[name]) for name in self)


class ChunkedAttention(TorchFunctionMode):
    """A mode in which F.scaled_dot_product_attention holds at most SCORES scores at a time."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            func = attention
        return func(*args, **(kwargs or {}))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention; if large, in pieces of [batch, heads, tokens, width]."""
    if not _splits(query, key, value, attn_mask, dropout_p, is_causal):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, queries, keys)
    result = query.new_empty(batch, heads, queries, value.shape[3])
    rows = min(queries, max(1, SCORES // keys))
    together = max(1, SCORES // (rows * keys))  # heads at a time
    starts = product(range(batch), range(0, heads, together), range(0, queries, rows))
    for sample, head, row in starts:
        part = (slice(sample, sample + 1), slice(head, head + together), slice(row, row + rows))
        some = range(heads)[part[1]]
        allowed = None if mask is None else mask[part]
        if is_causal and rows < queries:
            square = torch.ones(rows, keys, dtype=torch.bool, device=query.device)
            allowed = square[: queries - row].tril(row)
        result[part] = F.scaled_dot_product_attention(
            query[part],
            _heads_for(some, heads, key[part[0]]),
            _heads_for(some, heads, value[part[0]]),
            allowed,
            is_causal=is_causal and allowed is None,
            scale=scale,
        )
    return result


def _splits(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float, causal: bool
) -> bool:
    """Whether a call of attention is large, and of a kind that `attention` can split."""
    if not query.ndim == key.ndim == value.ndim == 4 or not len(query) == len(key) == len(value):
        return False
    if dropout or (causal and mask is not None):
        return False
    return query.shape[:3].numel() * key.shape[2] > SCORES


def _heads_for(some: range, heads: int, t: Tensor) -> Tensor:
    """The heads of a key or value that `some` query heads read; it may have fewer (GQA)."""
    group = heads // t.shape[1]
    return t[:, [head // group for head in some]]
