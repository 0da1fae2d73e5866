"""What blocks need of the masks of attention, made once for all blocks of a forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ...backends.torch_internals import added_where_false, view_base
from ...fuser import attention_by_lengths
from ...fuser.attention_by_lengths import Lengths
from .prompt_values import PerForwardCache


def lengths_of(
    kept: PerForwardCache, mask: Tensor, queries: int, keys: int
) -> Lengths | str | None:
    """What a mask says about lengths: asked once per forward, since that waits for the GPU, and not
    at all where blocks must not share the answer."""
    if not kept.is_allowed(mask):
        return None
    asked = *_view(mask), queries, keys
    return kept(view_base(mask), asked, lambda: attention_by_lengths.read(mask, queries, keys))


def numbers_of(
    kept: PerForwardCache, choice: SDPBackend, query: Tensor, mask: Tensor
) -> Tensor | None:
    """What a kernel of PyTorch's attention adds for the truth values of a mask, which each layer
    would compute again; None if blocks may not share it, or if it is not known."""
    if mask.dtype is not torch.bool or not kept.is_allowed(mask):
        return None
    lowest = added_where_false(choice, query.dtype, query.device)
    if lowest is None:
        return None

    def made() -> Tensor:
        hidden = torch.full((), lowest, dtype=query.dtype, device=query.device)
        return torch.where(mask, 0.0, hidden)

    return kept(view_base(mask), (*_view(mask), query.dtype, lowest), made)


def _view(mask: Tensor) -> tuple[Any, ...]:
    return mask.shape, mask.stride(), mask.storage_offset()
