"""Attention with query, key, value and probabilities in eight bits, in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..fp8.reference import DTYPE, LARGEST

ROWS = 128  # rows that share a scale of the keys; lengths in fp8 are multiples of it
LARGEST_INT = 127.0
CHUNK = 512  # keys of one partial sum
LOG2E = math.log2(math.e)
# probabilities are multiplied by it before they are rounded: the largest becomes 2 ** 8
SHIFT = 8


def padded(tokens: int) -> int:
    """A length in whole blocks of rows."""
    return -(-tokens // ROWS) * ROWS


def statistics(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Of each chunk of CHUNK keys [B, H, S, D] the sum of the keys, and the largest absolute value
    of each channel of the values: [B, H, chunks, D] and [B, H, chunks, E] in float32."""
    chunks = -(-key.shape[2] // CHUNK)
    k, v = (_rows(t.float(), chunks * CHUNK).unflatten(2, (chunks, CHUNK)) for t in (key, value))
    return k.sum(3), v.abs().amax(3)


def quantize(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sums: Tensor,
    largest: Tensor,
    scale: float,
    integers: bool,
) -> tuple[Tensor, ...]:
    """Query and key in eight bits [B, H, padded, D], value transposed [B, H, E, padded]; scales of
    query by row, with `scale` and log2(e), of key by block of ROWS, of value by channel. The mean
    of the keys is taken off them: that adds one number to all scores of a query."""
    q = _rows(query.float(), padded(query.shape[2]))
    mean = sums.sum(2, keepdim=True) / key.shape[2]
    k = _rows(key.float() - mean, padded(key.shape[2]))
    v = _rows(value.float(), padded(key.shape[2])).transpose(2, 3)
    q8, q_scale = _eight(q, q.abs().amax(3, keepdim=True), integers)
    blocks = k.unflatten(2, (-1, ROWS))
    k8, k_scale = _eight(blocks, blocks.abs().amax((3, 4), keepdim=True), integers)
    v8, v_scale = _eight(v, largest.amax(2)[..., None])
    return (
        *(q8, in_kernel_order(k8.flatten(2, 3)), v8),
        *(q_scale[..., 0] * (scale * LOG2E), k_scale[..., 0, 0], v_scale[..., 0]),
    )


def attention(
    q8: Tensor,
    k8: Tensor,
    v8: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    query: Tensor,
    keys: int,
) -> Tensor:
    """softmax(q8 · k8ᵀ) · v8 with these scales: [B, H, Sq, E] in the dtype of `query`, of which
    only dtype and number of rows are read. Probabilities are rounded to fp8, relative to a power of
    two, so that the order in which keys are met does not matter."""
    scores = q8.float() @ in_order_of_keys(k8).float().transpose(2, 3) * q_scale[..., None]
    scores = scores[..., :keys] * k_scale.repeat_interleave(ROWS, 2)[:, :, None, :keys]
    p = (scores - scores.amax(3, keepdim=True).ceil() + SHIFT).exp2()
    y = p.to(DTYPE).float() @ v8.float()[..., :keys].transpose(2, 3)
    y = y / p.sum(3, keepdim=True) * v_scale[:, :, None]
    y = y[:, :, : query.shape[2]].to(query.dtype)
    return y.transpose(1, 2).contiguous().transpose(1, 2)  # heads of a token lie together


def in_kernel_order(keys: Tensor) -> Tensor:
    """Rows of k8 [B, H, S, D] as they are stored: of 16 keys, in pairs, first the even pairs, then
    the odd ones. What a thread of the kernel then holds of the scores is what the tensor cores
    expect it to hold of the probabilities."""
    return keys.unflatten(2, (-1, 4, 2, 2)).transpose(3, 4).flatten(2, 5)


def in_order_of_keys(stored: Tensor) -> Tensor:
    return stored.unflatten(2, (-1, 2, 4, 2)).transpose(3, 4).flatten(2, 5)


def _rows(t: Tensor, length: int) -> Tensor:
    """t with rows of zeros up to `length`."""
    return torch.nn.functional.pad(t, (0, 0, 0, length - t.shape[2]))


def _eight(t: Tensor, largest: Tensor, integers: bool = False) -> tuple[Tensor, Tensor]:
    most, dtype = (LARGEST_INT, torch.int8) if integers else (LARGEST, DTYPE)
    largest = torch.where(largest == 0, most, largest)
    scaled = (t * (largest.reciprocal() * most)).contiguous()
    return (scaled + 0.5).floor().to(dtype) if integers else scaled.to(dtype), largest * (1 / most)
