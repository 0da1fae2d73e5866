"""Attention whose mask hides whole rows and whole keys, or what comes after each row: computed
without a mask.

Models that pad their text hide the padding with a dense mask. It says only which keys are valid,
and sometimes which rows: a few ranges of each. But the fastest kernels take no mask: on an H200
attention takes 1.5 to 2.3 times as long with one (HunyuanVideo and HunyuanVideo 1.5, 18616 and
21065 tokens). A causal mask hides half of the keys, and kernels that are told so skip them.

Nor does attention in which a row sees the last of the keys up to its own (sliding windows), where
PyTorch's flash attention can be told the window.

A row that sees no key gives zeros, as in PyTorch. If what hides keys is a finite number, the least
of its dtype, then PyTorch gives such a row a mean of values instead: those masks are used as is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention import window
from .recorded_ops import plain_attention

# ranges of valid rows, or keys, in one sample: words, padding, picture are two
MAX_RANGES = 4
# samples of different lengths are one call each
MAX_CALLS = 8
MORE = -1  # in place of the number of edges
# rows that see nothing and are computed all the same: to leave them out, the others are copied
# twice. Worked out for bfloat16 heads of 128 on an H200 (4 TB/s, 500 TFLOP/s), not timed
FEW_ROWS = 512

Ranges = tuple[tuple[int, int], ...]  # start and end of each


@dataclass(frozen=True)
class Lengths:
    """What a mask says: the valid rows and the valid keys of each sample; one entry if all samples
    are alike."""

    samples: tuple[tuple[Ranges, Ranges], ...]
    sizes: tuple[int, int]  # how many rows and keys there are, valid or not
    causal: bool = False  # a row sees the keys up to its own position
    window: int = 0  # a row sees so many keys up to its own position

    @property
    def all_rows(self) -> bool:
        return all(rows == ((0, self.sizes[0]),) for rows, _ in self.samples)


def read(mask: Tensor, queries: int, keys: int, windows: bool = False) -> Lengths | str:
    """What a mask [.., queries, keys], or one that broadcasts to that, says; or why attention needs
    the mask itself, as it does for `windows` where there is no kernel for them. Waits for the mask,
    once; twice if it is no mask of lengths."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return f"it is of {mask.dtype}"
    if mask.numel() == 0:
        return "it is empty"
    mask = _without_repeats(mask[(None,) * (4 - mask.ndim)])
    facts = _on_host(_facts(mask, queries, keys))
    if any(not 0 <= edges[0] <= 2 * MAX_RANGES for sample in facts for edges in sample):
        square = queries == keys and mask.shape[2:] == (queries, keys)
        ((width,),) = _on_host(_window(mask)) if square else ((0,),)
        causal = width == keys
        if causal or (width and windows):
            everything = ((0, queries),), ((0, keys),)
            return Lengths((everything,), (queries, keys), causal, 0 if causal else width)
        return "it says more than lengths"
    samples = [(_ranges(rows), _ranges(columns)) for rows, columns in facts]
    if len(set(samples)) == 1:
        samples = samples[:1]
    if len(samples) > MAX_CALLS:
        return f"{len(samples)} samples have different lengths"
    return Lengths(tuple(samples), (queries, keys))


def _on_host(facts: Tensor) -> Any:
    return facts.cpu().tolist()  # one copy of few numbers: a CUDA graph repeats and compares it


def described(said: Lengths | str) -> str:
    """How attention with a mask that says this runs."""
    if isinstance(said, str):
        return f"attention with its mask: {said}"
    if said.causal:
        return "causal attention without its mask"
    if said.window:
        return f"attention in a window of {said.window} keys, without its mask"
    counts = [sum(end - start for start, end in keys) for _, keys in said.samples]
    few, many = min(counts), max(counts)
    valid = f"{few}" if few == many else f"{few} to {many}"
    return f"attention by lengths: {valid} of {said.sizes[1]} keys"


def _without_repeats(mask: Tensor) -> Tensor:
    for dim, stride in enumerate(mask.stride()):
        if stride == 0 and mask.shape[dim]:  # expanded: the same values over and over
            mask = mask.narrow(dim, 0, 1)
    return mask


def _seen(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def _is_known(mask: Tensor, rows: Tensor) -> Tensor:
    """Whether what hides keys is a number that hides them; `rows` are those that see some."""
    if mask.dtype == torch.bool:
        return rows.new_ones(())
    least = mask == torch.finfo(mask.dtype).min
    hides = (mask == 0) | (mask == -torch.inf) | least
    return hides.all() & (rows.all() | ~least.any())


def _facts(mask: Tensor, queries: int, keys: int) -> Tensor:
    """[samples, 2, 1 + 2 * MAX_RANGES]: of rows and of keys the number of edges, and then the first
    edges. Instead of the number MORE, if the mask says more than its lengths."""
    seen = _seen(mask)
    # a mask computed as column & row may be stored column by column: read it in memory order
    turned = seen.stride(2) == 1 < seen.stride(3)
    words = _words(seen.transpose(2, 3) if turned else seen)
    valid = (words if words.dtype == torch.bool else words != 0).any(3)
    rows = valid.any(1)
    # valid rows must be like the first of them: of all heads, and in all heads the same ones
    first = valid.flatten(1).int().argmax(1)
    like = words.flatten(1, 2)[torch.arange(len(first), device=first.device), first]
    same = (words == like[:, None, None]).all(3) | ~valid
    full = (same & (valid == rows[:, None])).flatten(1).all(1)
    columns = like.view(torch.bool)
    if turned:
        rows, columns = columns, rows
    full &= _is_known(mask, rows)
    both = [
        _edges(valid.expand(-1, size), full) for valid, size in ((rows, queries), (columns, keys))
    ]
    return torch.stack(both, dim=1)


def _words(seen: Tensor) -> Tensor:
    """Truth values, eight of them as one number where they can be: passes over a mask of all pairs
    of tokens took 5 of 34 ms (HunyuanVideo 1.5, 3 layers, H200)."""
    # even the steps of dimensions with one element, which no layout depends on
    steps = *seen.stride()[:3], seen.shape[3], seen.storage_offset()
    whole = seen.is_contiguous() and seen.stride(3) == 1 and not any(step % 8 for step in steps)
    return seen.view(torch.int64) if whole else seen


def _window(mask: Tensor) -> Tensor:
    """How many keys a row sees up to its own position, [1, 1]: all there are if the mask is causal,
    and 0 if rows see other keys, or samples or heads do not agree."""
    visible = _seen(mask)
    place = torch.arange(visible.shape[2], device=mask.device)
    width = visible[0, 0, -1].sum()
    alike = (visible == window.seen(place, place, width)).all()
    return torch.where(alike & _is_known(mask, visible.any(3)), width, 0)[None, None]


def _edges(valid: Tensor, full: Tensor) -> Tensor:
    """Where valid tokens begin and end, [samples, 1 + 2 * MAX_RANGES], as in `_facts`."""
    padded = F.pad(valid, (1, 1 + 2 * MAX_RANGES))
    change = padded[:, 1:] != padded[:, :-1]
    position = torch.arange(change.shape[1], device=valid.device)
    edges = position.masked_fill(~change, change.shape[1]).sort(dim=1).values
    count = change.sum(1).masked_fill(~full, MORE)
    return torch.cat([count[:, None], edges[:, : 2 * MAX_RANGES]], dim=1)


def _ranges(edges: Sequence[int]) -> Ranges:
    count, *positions = edges
    return tuple(zip(positions[:count:2], positions[1:count:2], strict=True))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
    backends: Sequence[int],
    lengths: Lengths | str | None,
    like: Tensor,
    by: Callable[..., Tensor] = plain_attention,
) -> Tensor:
    """Attention as recorded, `by` this function; without the mask if it says only `lengths`. The
    result is laid out as `like`, the recorded one: another kernel may leave it in another order."""
    if not isinstance(lengths, Lengths):
        out = by(query, key, value, mask, dropout, causal, scale, grouped, backends)
        return laid_out(out, like)
    if lengths.window:
        seen = window.attend(query, key, value, scale, lengths.window)
        if seen is None:
            seen = by(query, key, value, mask, dropout, causal, scale, grouped, backends)
        return laid_out(seen, like)
    # without enable_gqa, PyTorch computes the whole score matrix of heads that share a key (Falcon)
    grouped = grouped or key.shape[1] != query.shape[1]
    how = dropout, causal or lengths.causal, scale, grouped, backends
    alike = len(lengths.samples) == 1
    rows, valid = lengths.samples[0]
    hidden = _between(rows, lengths.sizes[0])
    if alike and rows and sum(end - start for start, end in hidden) <= FEW_ROWS:
        out = by(query, _taken(key, valid), _taken(value, valid), None, *how)
        for start, end in hidden:
            out[:, :, start:end] = 0
        return laid_out(out, like)
    result = _empty(like, query)
    if not lengths.all_rows:
        result.zero_()
    for i, (rows, valid) in enumerate(lengths.samples):
        if not rows:
            continue
        q, k, v, into = (t if alike else t[i : i + 1] for t in (query, key, value, result))
        out = by(_taken(q, rows), _taken(k, valid), _taken(v, valid), None, *how)
        parts = out.split([end - start for start, end in rows], dim=2)
        for (start, end), part in zip(rows, parts, strict=True):
            into[:, :, start:end] = part
    return result


def laid_out(out: Tensor, like: Tensor) -> Tensor:
    """A result of attention in the layout that the steps after it were recorded with."""
    if out.stride() == like.stride():
        return out
    if _same_layout(out, like):
        return out.as_strided(like.shape, like.stride())
    return _empty(like, out).copy_(out)


def _between(ranges: Ranges, size: int) -> Ranges:
    """What is in none of these ranges."""
    ends = [0, *(end for _, end in ranges)]
    starts = [*(start for start, _ in ranges), size]
    return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)


def _taken(x: Tensor, ranges: Ranges) -> Tensor:
    """These tokens of [batch, heads, tokens, dim], in the layout of all of them. Where the heads of
    a token lie together, torch.cat would move them apart: at a sixth of the memory's bandwidth
    (Chroma, H200)."""
    parts = [x[:, :, start:end] for start, end in ranges]
    if len(parts) == 1:
        return parts[0]
    if x.stride(1) < x.stride(2):
        return torch.cat([p.transpose(1, 2) for p in parts], dim=1).transpose(1, 2)
    return torch.cat(parts, dim=2)


def _empty(like: Tensor, on: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=on.dtype, device=on.device)


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether elements lie in the same places: the stride of a single one does not matter."""
    dims = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(ours == theirs for size, ours, theirs in dims if size > 1)
