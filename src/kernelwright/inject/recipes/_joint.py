"""Query and key of several token streams, such as text and image, in joint attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops import selection
from ..fusions import Fusions
from ..fusions.compiled_ops import JOINT_QK

Rotary = tuple[Tensor, Tensor]
# arguments of IP-Adapter, which diffusers passes to all processors and others ignore
IGNORED_ARGUMENTS = {"ip_adapter_masks", "ip_hidden_states"}


class Stream(NamedTuple):
    """Query and key [batch, tokens, heads, dim] of one stream, and their norms or None."""

    query: Tensor
    key: Tensor
    norm_q: Any
    norm_k: Any


def joint_qk(
    fuse: Fusions,
    streams: Sequence[Stream],
    rotary: Rotary | None = None,
    rotate: Callable[[Tensor, Rotary], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate query and key of each stream, and concatenate the streams. `rotary` are
    tables [tokens of all streams, dim] for `rotate`."""
    if len(streams) == 1:
        return _norm_and_rotate(fuse, streams[0], rotary, rotate, None)
    sizes = [s.query.shape[1] for s in streams]
    tables: list[Any] = [None] * len(streams)
    if rotary is not None:
        tables = list(zip(rotary[0].split(sizes), rotary[1].split(sizes), strict=True))
    normed = all(s.norm_q is not None and s.norm_k is not None for s in streams)
    traced, recorded = torch.compiler.is_compiling(), torch.is_grad_enabled()
    joined = _traced(fuse, streams, tables, rotary) if normed and traced and not recorded else None
    if joined is not None:
        return joined
    if not normed or traced or recorded:
        made = [
            _norm_and_rotate(fuse, s, t, rotate, None) for s, t in zip(streams, tables, strict=True)
        ]
        return torch.cat([q for q, _ in made], dim=1), torch.cat([k for _, k in made], dim=1)
    # each stream is written into its slice: nothing to concatenate
    query, key = (
        _empty_tokens(streams[0].query, sum(sizes)),
        _empty_tokens(streams[0].key, sum(sizes)),
    )
    slices = zip(query.split(sizes, dim=1), key.split(sizes, dim=1), strict=True)
    for stream, table, out in zip(streams, tables, slices, strict=True):
        _norm_and_rotate(fuse, stream, table, rotate, out)
    return query, key


def _traced(
    fuse: Fusions, streams: Sequence[Stream], tables: Sequence[Any], rotary: Rotary | None
) -> tuple[Tensor, Tensor] | None:
    """The same as one op for torch.compile; None if there is no kernel for it."""
    found = [fuse.qk_norm_operands("", *s, t) for s, t in zip(streams, tables, strict=True)]
    hows = [how for how in found if how is not None and how.q_weight is not None]
    if len(hows) < len(streams) or any(how.separate != hows[0].separate for how in hows):
        return None
    cos, sin = (None, None) if rotary is None else rotary
    return JOINT_QK(
        [s.query for s in streams],
        [s.key for s in streams],
        [how.q_weight for how in hows],
        [how.k_weight for how in hows],
        [how.eps for how in hows],
        cos,
        sin,
        hows[0].exact or "",
        hows[0].backend or selection.traced(),
        hows[0].separate,
    )


def _norm_and_rotate(
    fuse: Fusions,
    stream: Stream,
    rotary: Rotary | None,
    rotate: Callable[[Tensor, Rotary], Tensor] | None,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    def rotated(x: Tensor) -> Tensor:
        return x if rotary is None or rotate is None else rotate(x, rotary)

    query, key, norm_q, norm_k = stream
    if norm_q is None or norm_k is None:
        query, key = norm_q(query) if norm_q else query, norm_k(key) if norm_k else key
        return rotated(query), rotated(key)
    return fuse.qk_norm_rope(query, key, norm_q, norm_k, rotary, rotated, out=out)


def _empty_tokens(like: Tensor, tokens: int) -> Tensor:
    return like.new_empty((like.shape[0], tokens, *like.shape[2:]))
