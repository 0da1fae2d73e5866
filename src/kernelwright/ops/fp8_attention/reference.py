"""Attention with query, key, value and probabilities in eight bits, in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..fp8.reference import DTYPE, LARGEST

ROWS = 128  # keys of a tile, which share a scale; lengths in eight bits are multiples of it
LARGEST_INT = 127.0
SAMPLE = 256  # keys whose mean is taken off all of them
LOG2E = math.log2(math.e)
# probabilities are multiplied by it before they are rounded: the largest becomes 2 ** 8
SHIFT = 8


def padded(tokens: int) -> int:
    """A length in whole tiles."""
    return -(-tokens // ROWS) * ROWS


def mean(key: Tensor) -> Tensor:
    """About the mean of the keys [B, H, S, D]: that of SAMPLE of them, [B, H, D] in float32. Any
    vector may be taken off all keys: that adds one number to all scores of a query. Reading a few
    keys takes 5 us, reading all of FLUX 10 us more."""
    keys = key.shape[2]
    chosen = torch.arange(SAMPLE, device=key.device) * keys // SAMPLE
    return key[:, :, chosen].float().mean(2)


def quantize(
    query: Tensor, key: Tensor, value: Tensor, mean: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """Query as int8 [B, H, padded, D], key as int8 and value as fp8, transposed, in tiles
    [B, H, tiles, ROWS * D]; scales of query by row, with `scale` and log2(e), of key and value by
    tile. `mean` is taken off the keys."""
    q = _rows(query.float(), padded(query.shape[2]))
    k = _rows(key.float() - mean[:, :, None], padded(key.shape[2])).unflatten(2, (-1, ROWS))
    v = _rows(value.float(), padded(key.shape[2])).unflatten(2, (-1, ROWS))
    q8, q_scale = _integers(q, q.abs().amax(3, keepdim=True))
    k8, k_scale = _integers(k, k.abs().amax((3, 4), keepdim=True))
    v8, v_scale = _eight(v, v.abs().amax((3, 4), keepdim=True))
    return (
        *(q8, as_tiles(in_kernel_order(k8)), as_tiles(v8.transpose(3, 4))),
        *(q_scale[..., 0] * (scale * LOG2E), k_scale[..., 0, 0], v_scale[..., 0, 0]),
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
    two, so that the order in which keys are met does not matter; they are rounded with the scale of
    their value, so that tiles can be added. Before that they are off by up to 6%: see power."""
    k = in_order_of_keys(of_tiles(k8, ROWS)).flatten(2, 3)
    v = of_tiles(v8, k.shape[3]).transpose(3, 4).flatten(2, 3)
    of_k, of_v = (s.repeat_interleave(ROWS, 2)[:, :, None, :keys] for s in (k_scale, v_scale))
    scores = (q8.float() @ k.float().transpose(2, 3) * q_scale[..., None])[..., :keys]
    scores = scores * of_k + of_v.log2()
    p = power(scores - scores.amax(3, keepdim=True).ceil() + SHIFT)
    y = p.to(DTYPE).float() @ v.float()[:, :, :keys]
    y = y / (p / of_v).sum(3, keepdim=True)
    y = y[:, :, : query.shape[2]].to(query.dtype)
    return y.transpose(1, 2).contiguous().transpose(1, 2)  # heads of a token lie together


def power(x: Tensor) -> Tensor:
    """2 ** x, between powers of two on a straight line, which is up to 6% above it. The kernel then
    makes it from an integer score in two instructions. With exponentials, which are a third of the
    kernel's time, the error of attention is 3.9% instead of 4.3%."""
    whole = x.floor()
    return whole.exp2() * (1 + x - whole)


def in_kernel_order(keys: Tensor) -> Tensor:
    """Rows of tiles [..., ROWS, D] as they are stored: of 16 keys, in pairs, first the even pairs,
    then the odd ones. What a thread of the kernel then holds of the scores is what the tensor cores
    expect it to hold of the probabilities."""
    return keys.unflatten(-2, (-1, 4, 2, 2)).transpose(-4, -3).flatten(-5, -2)


def in_order_of_keys(stored: Tensor) -> Tensor:
    return stored.unflatten(-2, (-1, 2, 4, 2)).transpose(-4, -3).flatten(-5, -2)


def as_tiles(t: Tensor) -> Tensor:
    """[..., rows, columns] in blocks of 8 rows x 16 bytes, as tensor cores of Hopper read them: a
    tile is copied to shared memory as it is."""
    return (
        t.unflatten(-1, (-1, 16)).unflatten(-3, (-1, 8)).transpose(-3, -2).flatten(-4).contiguous()
    )


def of_tiles(tiles: Tensor, rows: int) -> Tensor:
    columns = tiles.shape[-1] // rows
    blocks = tiles.unflatten(-1, (rows // 8, columns // 16, 8, 16))
    return blocks.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def _rows(t: Tensor, length: int) -> Tensor:
    """t with rows of zeros up to `length`."""
    return torch.nn.functional.pad(t, (0, 0, 0, length - t.shape[2]))


def _integers(t: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    largest = torch.where(largest == 0, LARGEST_INT, largest)
    scaled = (t * (largest.reciprocal() * LARGEST_INT)).contiguous()
    return (scaled + 0.5).floor().to(torch.int8), largest * (1 / LARGEST_INT)


def _eight(t: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """With scales that are powers of two: they do not move where probabilities are rounded."""
    largest = torch.where(largest == 0, LARGEST, largest)
    scale = (largest * (1 / LARGEST)).log2().ceil().exp2()
    return (t * scale.reciprocal()).to(DTYPE), scale
