"""Weights in eight bits, beside those of their layers: of one layer, and of several together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import fp8
from . import adapters


@dataclass
class Quantised:
    """A layer as it was quantised. `good` is None as long as nobody has looked."""

    address: int
    version: int
    moves: int
    weight: Tensor
    scale: Tensor
    good: bool | None = None

    def is_of(self, layer: Any) -> bool:
        """Whether nobody has written to the layer's weight since."""
        weight = layer.weight
        return (
            self.address == weight.data_ptr()
            and self.version == weight._version
            and self.moves == adapters.moves(layer)
        )


def quantise(layer: Any) -> Quantised:
    """A layer as it is now."""
    adapters.watch(layer)
    weight = layer.weight
    facts = weight.data_ptr(), weight._version, adapters.moves(layer)
    return Quantised(*facts, *fp8.quantize_weight(weight))


@dataclass
class Pack:
    """Layers of one input as one product: their weights one below the other, of which those of
    the layers are then parts, and a copy of their biases."""

    layers: tuple[Quantised, ...]
    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    biases: list[tuple[int, int]]

    @staticmethod
    def of(layers: Sequence[Any], quantised: Iterable[Quantised]) -> Pack:
        kept = tuple(quantised)
        # not every device can join eight-bit floats
        weight = torch.cat([k.weight.view(torch.uint8) for k in kept]).view(fp8.DTYPE)
        scale = torch.cat([k.scale for k in kept])
        bias = None if layers[0].bias is None else torch.cat([m.bias.detach() for m in layers])
        sizes = [m.out_features for m in layers]
        for k, w, s in zip(kept, weight.split(sizes), scale.split(sizes), strict=True):
            k.weight, k.scale = w, s
        return Pack(kept, weight, scale, bias, _facts_of_biases(layers))

    def is_of(self, layers: Sequence[Any], kept: Sequence[Quantised | None]) -> bool:
        """Whether these layers, as they were quantised last, are the ones, and unchanged."""
        return (
            len(kept) == len(self.layers)
            and all(a is b for a, b in zip(kept, self.layers, strict=True))
            and all(k.is_of(layer) for k, layer in zip(self.layers, layers, strict=True))
            and self.biases == _facts_of_biases(layers)
        )


def _facts_of_biases(layers: Sequence[Any]) -> list[tuple[int, int]]:
    return [(b.data_ptr(), b._version) for b in (m.bias for m in layers) if b is not None]
