"""What the masks of attention say, for all blocks of a forward."""

from __future__ import annotations

from torch import Tensor

from ...backends.torch_internals import view_base
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
    view = mask.shape, mask.stride(), mask.storage_offset(), queries, keys
    return kept(view_base(mask), view, lambda: attention_by_lengths.read(mask, queries, keys))
