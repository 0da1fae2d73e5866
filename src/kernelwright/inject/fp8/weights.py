"""Weights in eight bits beside the 16-bit ones of their layers: of one layer, and of several
packed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops import fp8
from ...ops.few_rows import quantize_to_integers
from ..reuse.prompt_values import MadeFrom
from ..state.tensor_samples import TensorSamples
from ..state.weights_at_rest import is_at_rest
from .memory_blocks import GpuBlocks, joined


@dataclass
class Quantised:
    """The weight of a layer in fp8, or as int8 for rows in 16 bits. `good` is None until its result
    was compared."""

    made: MadeFrom
    weight: Tensor
    scale: Tensor
    integers: bool
    good: bool | None = None
    few: bool | None = None  # whether the kernel for few rows comes near, None until it was seen

    def is_of(self, layer: Any, samples: TensorSamples) -> bool:
        """Whether this is still the layer's weight, and nobody has written to it since."""
        return self.made.holds((layer.weight,), samples.epoch)

    def remade(self, layer: Any, samples: TensorSamples) -> None:
        """The layer's weight has the same values in another place."""
        self.made = _made(layer, samples)


def quantise(
    layer: Any,
    samples: TensorSamples,
    device: torch.device,
    memory: GpuBlocks,
    integers: bool = False,
    instead: Tensor | None = None,
) -> Quantised:
    """A layer as it is now, in the memory of `instead` if that is given; its 16-bit weight need not
    be on `device`."""
    made = _made(layer, samples)
    eight_bits = quantize_to_integers if integers else fp8.quantize_weight
    weight, scale = eight_bits(layer.weight.detach().to(device))
    return Quantised(made, memory.copy_of(weight, instead), scale, integers)


def _made(layer: Any, samples: TensorSamples) -> MadeFrom:
    samples.note(layer.weight, sparse=is_at_rest(layer.weight))
    return MadeFrom.of((layer.weight,), samples.epoch)


@dataclass
class Pack:
    """Layers of one input as one GEMM: their fp8 weights in one block, of which each layer's is a
    slice, and a copy of their biases."""

    layers: tuple[Quantised, ...]
    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    biases: MadeFrom
    few: bool | None = None  # as of a layer

    @staticmethod
    def of(
        layers: Sequence[Any],
        quantised: Iterable[Quantised],
        samples: TensorSamples,
        memory: GpuBlocks,
    ) -> Pack:
        kept = tuple(quantised)
        weight = joined([k.weight for k in kept])
        if weight is None:  # not every device can concatenate fp8 tensors
            together = torch.cat([k.weight.view(torch.uint8) for k in kept]).view(fp8.DTYPE)
            weight = memory.copy_of(together)
        scale = torch.cat([k.scale for k in kept])
        biases = _biases(layers)
        for b in biases:
            samples.note(b)
        made = MadeFrom.of(biases, samples.epoch)
        bias = torch.cat([b.detach() for b in biases]) if biases else None
        sizes = [m.out_features for m in layers]
        for k, w, s in zip(kept, weight.split(sizes), scale.split(sizes), strict=True):
            k.weight, k.scale = w, s
        return Pack(kept, weight, scale, bias, made)

    @property
    def is_good(self) -> bool:
        """Whether all of them have been compared with 16 bits."""
        return all(k.good for k in self.layers)

    def is_of(
        self, layers: Sequence[Any], kept: Sequence[Quantised | None], samples: TensorSamples
    ) -> bool:
        """Whether this is of these layers, as they were quantised last, and they are unchanged."""
        return (
            len(kept) == len(self.layers)
            and all(a is b for a, b in zip(kept, self.layers, strict=True))
            and all(k.is_of(m, samples) for k, m in zip(self.layers, layers, strict=True))
            and self.biases.holds(_biases(layers), samples.epoch)
        )


def _biases(layers: Sequence[Any]) -> list[Tensor]:
    return [m.bias for m in layers if m.bias is not None]
