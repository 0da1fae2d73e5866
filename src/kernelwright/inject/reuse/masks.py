"""What blocks need of the masks of attention, made once for all blocks of a forward."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ...backends.torch_internals import added_where_false, view_base
from ...fuser import attention_by_lengths
from ...fuser.attention_by_lengths import Lengths
from ..graphs.mask_decisions import decided
from .prompt_values import PerForwardCache


def lengths_of(
    kept: PerForwardCache, mask: Tensor, queries: int, keys: int, windows: bool = False
) -> Lengths | str | None:
    """What a mask says about lengths, or about a window where that helps: asked once per forward,
    since that waits for the GPU, and not at all where blocks must not share the answer."""
    if not kept.is_allowed(mask):
        return None
    asked = queries, keys, windows
    said = partial(decided, attention_by_lengths.read, mask, *asked)
    return kept(view_base(mask), (*_view(mask), *asked), said)


def numbers_of(
    kept: PerForwardCache, choice: SDPBackend, query: Tensor, mask: Tensor
) -> Tensor | None:
    """What a kernel of PyTorch's attention adds for the truth values of a mask, which each layer
    would compute again; None if blocks may not share it, or if it is not known."""
    if not _may_share(kept, mask):
        return None
    lowest = added_where_false(choice, query.dtype, query.device)
    return None if lowest is None else _numbers(kept, mask, query, lowest)


def infinities_of(kept: PerForwardCache, query: Tensor, mask: Tensor) -> Tensor | None:
    """The same with minus infinity, which gives zeros in rows that see no key."""
    return _numbers(kept, mask, query, -math.inf) if _may_share(kept, mask) else None


def _may_share(kept: PerForwardCache, mask: Tensor) -> bool:
    return mask.dtype is torch.bool and kept.is_allowed(mask)


def _numbers(kept: PerForwardCache, mask: Tensor, query: Tensor, lowest: float) -> Tensor:
    def made() -> Tensor:
        return torch.where(mask, 0.0, query.new_full((), lowest))

    return kept(view_base(mask), (*_view(mask), query.dtype, lowest), made)


def _view(mask: Tensor) -> tuple[Any, ...]:
    return mask.shape, mask.stride(), mask.storage_offset()
