"""Linear layers of the few rows that a language model decodes at a time.

Their time is that of reading the weights. In the tiers that may round differently a kernel reads
each weight once, as fast as memory gives it, with the gated activation behind gate and up; `exact`
keeps cuBLAS's kernels, whose sums it has to repeat. In fp8, a weight that was quantised for a
prompt is read in eight bits, half as many bytes; the rows stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...backends.torch_internals import all_modules_hooked
from ...ops.few_rows import LINEAR_FEW_ROWS, is_few, suits
from ..reuse import packed_weights
from ..runtime.sites import site
from .base import hooked_now
from .feed_forward import FeedForwardFusions
from .projections import GATE_UP, ProjectionFusions, may_bypass, run_linear

LAYER = "a linear layer of few rows"
GATED = "gate, up and SwiGLU of few rows"


class FewRowsFusions(ProjectionFusions, FeedForwardFusions):
    def linear(self, layer: Any, x: Tensor) -> Tensor:
        """layer(x)"""
        if self.may_sum_otherwise and is_few(x) and may_bypass((layer,)):
            weight, bias = layer._parameters["weight"], layer._parameters["bias"]
            if suits(x, weight, bias):
                return site(
                    LAYER,
                    lambda: layer(x),
                    lambda: LINEAR_FEW_ROWS(x, weight, bias, False),
                    x,
                )
        return run_linear(layer, x)

    def gated_feed_forward(
        self, gate: Any, up: Any, activation: nn.Module, down: Any, x: Tensor
    ) -> Tensor:
        """down(SiLU(gate(x)) * up(x)); `activation` is the model's SiLU."""
        rows = None
        if is_few(x) and not torch.compiler.is_compiling() and not hooked_now(activation):
            rows = self._gated((gate, up), activation, x)
        if rows is not None:
            return self.linear(down, rows)
        return self.swiglu_linear(down, activation, *self.projections(GATE_UP, x, (gate, up)))

    def _gated(self, layers: Sequence[Any], activation: nn.Module, x: Tensor) -> Tensor | None:
        """SiLU(gate(x)) * up(x) by one kernel; None where that is not possible."""
        if self.fp8_layers is not None:
            return None if all_modules_hooked() else self.fp8_layers.gated(layers, x)
        if not self.may_sum_otherwise or not may_bypass(layers):
            return None
        packed = packed_weights.packed(layers, x)
        if isinstance(packed, str) or packed.bias is not None:
            return None
        weight, sizes = packed.weight, packed.sizes
        if sizes[0] != sizes[1] or not suits(x, weight):
            return None

        def eager() -> Tensor:
            gate, up = (layer(x) for layer in layers)
            return activation(gate) * up

        return site(GATED, eager, lambda: LINEAR_FEW_ROWS(x, weight, None, True), x)
