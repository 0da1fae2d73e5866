"""Random numbers for gradients, and in place of values that prove nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.informative import informative


class Numbers:
    """Random numbers of generators of their own: nobody else's draws are affected."""

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def instead_of_zeros(self, t: Tensor) -> Tensor:
        if not t.is_floating_point() or informative(t):
            return t
        return self._like(t.shape, t.stride(), t.dtype, t.device)

    def gradient(self, like: Any) -> Tensor | None:
        """A gradient for a result, or of a layout."""
        if like is None:
            return None
        if isinstance(like, Tensor):
            like = torch.empty_like(like)
            return self._like(like.shape, like.stride(), like.dtype, like.device)
        _, shape, strides, dtype, device = like
        return self._like(shape, strides, dtype, device)

    def _like(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        own = [1 if s == 0 else n for n, s in zip(shape, strides, strict=True)]
        made = torch.empty_strided(own, strides, dtype=dtype, device=device)
        return made.normal_(generator=self._generators[device]).expand(shape)
