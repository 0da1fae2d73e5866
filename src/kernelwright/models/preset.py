"""A preset: a published model by name, built from its config alone, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .weights import random_model

Sizes = Mapping[str, int]

# offset of the seed: inputs must not repeat the random numbers of the weights
INPUTS = 1 << 20


class Draw:
    """Random tensors of one dtype on one device.

    They are drawn on the CPU, so a seed gives the same inputs on every device.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device, seed: int) -> None:
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator().manual_seed(seed + INPUTS)

    def normal(self, *shape: int) -> Tensor:
        noise = torch.randn(shape, generator=self._generator, dtype=torch.float32)
        return noise.to(self.device, self.dtype)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self._generator).to(self.device)

    def timestep(self, value: float, batch: int) -> Tensor:
        """A scheduler's timestep as pipelines pass it: one number, expanded. [batch]"""
        kind = torch.float32 if isinstance(value, float) else torch.int64
        return torch.tensor(value, device=self.device, dtype=kind).expand(batch)

    def mask(self, batch: int, tokens: int) -> Tensor:
        """True for a word, False for padding [batch, tokens].

        Every other prompt, starting with the first, is short, like the empty prompt of guidance.
        """
        short = torch.arange(batch) % 2 == 0
        words = torch.where(short, max(tokens // 4, 1), tokens)
        return (torch.arange(tokens) < words[:, None]).to(self.device)

    def grid(self, *sizes: int) -> Tensor:
        """Coordinates of every cell of a grid, the last axis fastest [cells, axes]."""
        return torch.cartesian_prod(*map(torch.arange, sizes)).to(self.device)


@dataclass(frozen=True)
class Preset:
    """A published model: its config, a tiny one of the same structure, and inputs for both."""

    name: str
    title: str
    library: str
    class_name: str
    config: Mapping[str, Any]
    tiny_config: Mapping[str, Any]  # what differs in the tiny one
    sizes: Sizes
    tiny_sizes: Sizes
    make_inputs: Callable[[Draw, Mapping[str, Any], Sizes], dict[str, Any]]
    what: str  # one forward at these sizes, in a line: resolution, tokens, what is special
    pixels: int = 1  # heights and widths are multiples of it
    frames: int = 1  # the number of frames is a multiple of it plus `first_frames`
    first_frames: int = 1
    depth: tuple[str, ...] = ("num_layers",)  # entries of the config that count layers
    # the config with N layers of each kind, where limiting the entries of `depth` to N is not that
    shallow: Callable[[Mapping[str, Any], int], Mapping[str, Any]] | None = None

    def build(
        self,
        *,
        tiny: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        seed: int = 0,
        layers: int | None = None,
    ) -> nn.Module:
        """The model with random weights, in eval mode and with the dtypes of `from_pretrained`.

        On the "meta" device it has the structure but takes no memory. `layers` builds at most so
        many layers of each kind of block, at full width.
        """
        return random_model(
            self.library,
            self.class_name,
            self._with_layers(self._config(tiny), layers),
            dtype=dtype,
            device=device,
            seed=seed,
        )

    def inputs(
        self,
        *,
        tiny: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        seed: int = 0,
        **sizes: int,
    ) -> dict[str, Any]:
        """Arguments of one forward, `model(**inputs)`, as the model's own pipeline passes them.

        `sizes` are any of the preset's `sizes`, such as batch, height and width in pixels, frames,
        text (its tokens), tokens; the others keep their defaults.
        """
        self.check(**sizes)
        defaults = self.tiny_sizes if tiny else self.sizes
        draw = Draw(dtype, device, seed)
        return self.make_inputs(draw, self._config(tiny), {**defaults, **sizes})

    def check(self, *, layers: int | None = None, **sizes: int) -> None:
        """Raise a ValueError if `build` does not take these layers, or `inputs` these sizes."""
        if layers is not None and layers < 1:
            raise ValueError(f"{self.name}: layers is {layers}, expected 1 or more")
        for name, value in sizes.items():
            if name not in self.sizes:
                known = list(self.sizes)
                raise ValueError(f"{self.name}: no size {name!r}, expected any of {known}")
            multiple = self.pixels if name in ("height", "width", "side") else 1
            if value < 1 or value % multiple:
                wanted = f"a multiple of {multiple}" if multiple > 1 else "1 or more"
                raise ValueError(f"{self.name}: {name} is {value}, expected {wanted}")
            if name == "frames" and (over := (value - self.first_frames) % self.frames):
                below = max(value - over, self.first_frames)
                raise ValueError(
                    f"{self.name}: frames is {value}, expected {self.frames}k + "
                    f"{self.first_frames}: {below} or {below + self.frames}"
                )

    def _config(self, tiny: bool) -> dict[str, Any]:
        return {**self.config, **self.tiny_config} if tiny else dict(self.config)

    def _with_layers(self, config: dict[str, Any], layers: int | None) -> dict[str, Any]:
        if layers is None:
            return config
        self.check(layers=layers)
        if self.shallow is not None:
            return {**config, **self.shallow(config, layers)}
        return {**config, **{name: _at_most(config[name], layers) for name in self.depth}}


def _at_most(count: Any, layers: int) -> Any:
    """A number of layers, or one for each level of a UNet, limited to `layers`."""
    if isinstance(count, tuple):
        return tuple(min(each, layers) for each in count)
    return min(count, layers)
