"""Attention with query, key, value and probabilities in eight bits, in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..fp8.reference import DTYPE, LARGEST

ROWS = 128  # keys of a tile, which share a scale; lengths in eight bits are multiples of it
LARGEST_INT = 127.0
SAMPLE = 32  # keys whose mean is taken off all of them
GOLDEN = 2654435769  # 2 ** 32 divided by the golden ratio
LOG2E = math.log2(math.e)
# probabilities are multiplied by it before they are rounded: the largest becomes 2 ** 8
SHIFT = 8
LEAST_LOG = -100  # scales of values are at least 2 to this power: a float, as is 1 / scale


def padded(tokens: int) -> int:
    """A length in whole tiles."""
    return -(-tokens // ROWS) * ROWS


def mean(key: Tensor) -> Tensor:
    """About the mean of the keys [B, H, S, D]: that of SAMPLE of them, [B, H, D] in float32. Any
    vector may be subtracted from all keys: that adds one number to all scores of a query.

    The keys are divided into SAMPLE parts, and one key is read from each, every time at another
    offset: at equal distances they could all lie in a few columns of an image."""
    keys = key.shape[2]
    number = torch.arange(SAMPLE, device=key.device)
    chosen = number * keys // SAMPLE + (number * GOLDEN % 2**32 * (keys // SAMPLE) >> 32)
    return key[:, :, chosen].float().mean(2)


def quantize(key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Key as int8 and value as fp8, transposed, in tiles [B, H, tiles, ROWS * D]; and of each tile
    the scales of key and value, the length of its longest key, and 0. About the mean of the keys is
    subtracted from them."""
    k = _rows(key.float() - mean(key)[:, :, None], padded(key.shape[2])).unflatten(2, (-1, ROWS))
    v = _rows(value.float(), padded(key.shape[2])).unflatten(2, (-1, ROWS))
    length = k.norm(dim=4).amax(3)
    k8, k_scale = _integers(k, k.abs().amax((3, 4), keepdim=True))
    v8, v_scale = _eight(v, v.abs().amax((3, 4), keepdim=True))
    return (
        as_tiles(in_kernel_order(k8)),
        as_tiles(v8.transpose(3, 4)),
        torch.stack(
            [k_scale[..., 0, 0], v_scale[..., 0, 0], length, torch.zeros_like(length)], dim=-1
        ),
    )


def attention(
    query: Tensor,
    k8: Tensor,
    v8: Tensor,
    scales: Tensor,
    keys: int,
    scale: float,
) -> Tensor:
    """softmax(query · scale · k8ᵀ) · v8 with the scales of tiles: [B, H, Sq, E]. Queries are
    rounded to int8, with a scale for each. Probabilities are rounded to fp8, relative to a power of
    two, so that the order in which keys are met hardly matters; they are rounded with the scale of
    their value, so that tiles can be added. Before that they are off by up to 6%: see power."""
    q = query.float()
    q8, q_scale = _integers(q, q.abs().amax(3, keepdim=True))
    k = in_order_of_keys(of_tiles(k8, ROWS)).flatten(2, 3)
    v = of_tiles(v8, k.shape[3]).transpose(3, 4).flatten(2, 3)
    of_k, of_v, *_ = scales.repeat_interleave(ROWS, 2)[:, :, None, :keys].unbind(-1)
    scores = (q8.float() @ k.float().transpose(2, 3))[..., :keys]
    scores = scores * _in_steps(q_scale * (scale * LOG2E) * of_k) + of_v.log2()
    p = power(scores - scores.amax(3, keepdim=True).ceil() + SHIFT)
    y = p.to(DTYPE).float() @ v.float()[:, :, :keys]
    y = y / (p / of_v).sum(3, keepdim=True)
    return empty_result(query).copy_(y)


def empty_result(query: Tensor) -> Tensor:
    """[B, H, Sq, D] in the layout of the queries, as PyTorch's kernels have it: what comes next was
    written for that."""
    batch, heads, queries, dim = query.shape
    if query.stride(1) > query.stride(2):
        return query.new_empty(batch, heads, queries, dim)
    return query.new_empty(batch, queries, heads, dim).transpose(1, 2)


def power(x: Tensor) -> Tensor:
    """2 ** x, between powers of two on a straight line, which is up to 6% above it. The kernel then
    makes it from an integer score in two instructions. With exponentials, which are a third of the
    kernel's time, the error of attention is 3.9% instead of 4.3%."""
    whole = x.floor()
    return whole.exp2() * (1 + x - whole)


def _in_steps(factor: Tensor) -> Tensor:
    """Factors of scores in steps of 2 ** -23, the last bit of a float between 1 and 2: the kernel
    makes powers of integer scores out of integers. What is not finite becomes NaN."""
    return (factor * 2.0**23).round().clamp(1, 60 * 2.0**23) * 2.0**-23 + 0 * factor


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
    return scaled.round().to(torch.int8), largest * (1 / LARGEST_INT)


def _eight(t: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """With scales that are powers of two: they do not move where probabilities are rounded."""
    largest = torch.where(largest == 0, LARGEST, largest)
    scale = (largest * (1 / LARGEST)).log2().ceil().clamp(min=LEAST_LOG).exp2()
    return (t * scale.reciprocal()).to(DTYPE), scale
