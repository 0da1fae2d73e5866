"""A case: one set of arguments of an op, made for any device, dtype and seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """Where a case's random tensors come from; values are drawn on the CPU, the same everywhere.
    `scale` and `mean` stretch and move all of them."""

    dtype: torch.dtype
    device: str = "cpu"
    seed: int = 0
    scale: float = 1.0
    mean: float = 0.0

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        """[*shape], normal; another call gives other values."""
        if self.device == "meta":
            return torch.empty(shape, dtype=self.dtype, device="meta")
        generator = self._generator(shape)
        values = torch.randn(shape, generator=generator, device=generator.device)
        values = values.mul_(scale * self.scale).add_(mean + self.mean)
        return values.to(self.dtype).to(self.device)

    def weight(self, *shape: int) -> Tensor:
        """[*shape], around one, as norm weights are."""
        return self.normal(*shape, scale=0.3, mean=1.0)

    def angles(self, *shape: int) -> tuple[Tensor, Tensor]:
        """cos and sin tables [*shape] in float32, as models hand them over."""
        if self.device == "meta":
            table = torch.empty(shape, device="meta")
            return table, table
        generator = self._generator(shape)
        angle = torch.rand(shape, generator=generator, device=generator.device) * 6.28
        return angle.cos().to(self.device), angle.sin().to(self.device)

    def _generator(self, shape: tuple[int, ...]) -> torch.Generator:
        # large cases are drawn on the GPU itself: a billion values take a minute on the CPU
        device = self.device if torch.Size(shape).numel() > 1 << 22 else "cpu"
        state = self._drawn.setdefault(device, torch.Generator(device).manual_seed(self.seed))
        return state

    def __post_init__(self) -> None:
        object.__setattr__(self, "_drawn", {})

    _drawn: Any = None


# arguments of an op for so many rows of a width, as the eager chain named last takes them
Sized = Callable[[Inputs, int, int, str], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """`arguments(inputs)` gives the op's arguments by name. `large` cases time kernels on a GPU
    and stay out of the CPU tests; `preset` groups them by the model the shape comes from."""

    name: str
    arguments: Callable[[Inputs], dict[str, Any]]
    large: bool = False
    preset: str = ""
