"""A case: one set of arguments of an op, for any device, dtype and seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """Draws a case's random tensors, on the CPU, so that values are the same on every machine.
    `scale` and `mean` apply to all of them."""

    dtype: torch.dtype
    device: str = "cpu"
    seed: int = 0
    scale: float = 1.0
    mean: float = 0.0

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        """[*shape], normally distributed; each call draws new values."""
        if self.device == "meta":
            return torch.empty(shape, dtype=self.dtype, device="meta")
        generator = self._generator(shape)
        values = torch.randn(shape, generator=generator, device=generator.device)
        values = values.mul_(scale * self.scale).add_(mean + self.mean)
        return values.to(self.dtype).to(self.device)

    def weight(self, *shape: int) -> Tensor:
        """[*shape], around one, like norm weights."""
        return self.normal(*shape, scale=0.3, mean=1.0)

    def angles(self, *shape: int) -> tuple[Tensor, Tensor]:
        """cos and sin tables [*shape] in float32, as models pass them."""
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


# (inputs, rows, width, chain) -> arguments of an op, as that eager chain takes them
Sized = Callable[[Inputs, int, int, str], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """`arguments(inputs)` gives the op's arguments by name. `large` cases time kernels on a GPU and
    are left out of the CPU tests; `preset` names the model that the shape comes from."""

    name: str
    arguments: Callable[[Inputs], dict[str, Any]]
    large: bool = False
    preset: str = ""
