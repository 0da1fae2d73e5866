"""Several linear layers of one input as one product."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.linear import algorithms
from ..reuse import packed_gemm, packed_weights
from ..runtime.forwards import hooked
from ..runtime.sites import declined, site
from ..state.hooks import all_modules_hooked, is_plain
from .base import Places

QKV = "QKV in one product"
TEXT_QKV = "QKV of the text in one product"
GATE_UP = "gate and up in one product"
OTHER_BITS = "it sums in another order than its layers alone"


class ProjectionPlaces(Places):
    def projections(self, name: str, x: Tensor, layers: Sequence[Any]) -> tuple[Tensor, ...]:
        """layer(x) of each layer: views of one product, whose rows lie as far apart as all of them
        are wide. Exact only where cuBLAS sums that product as it sums those of the layers alone,
        which is found out once for each shape."""

        def eager() -> tuple[Tensor, ...]:
            return tuple([layer(x) for layer in layers])

        if torch.compiler.is_compiling():
            return self._traced(x, layers) if self._may_trace(x, layers) else eager()
        if self.fp8_layers is not None:
            eight = None if all_modules_hooked() else self.fp8_layers.together(layers, x)
            return eager() if eight is None else eight
        if not may_go_around(layers):
            declined(name, "an adapter or a hook is on one of its layers")
            return eager()
        packed = packed_weights.packed(layers, x)
        if isinstance(packed, str):
            declined(name, packed)
            return eager()

        def kernel() -> tuple[Tensor, ...]:
            return packed_gemm.one(x, packed).split_with_sizes(packed.sizes, -1)

        bias = packed.bias is not None
        if self.exact and not self.same_bits("one", x, packed.sizes, bias, kernel, eager):
            declined(name, OTHER_BITS)
            return eager()
        return site(name, eager, kernel, x)

    def _may_trace(self, x: Tensor, layers: Sequence[Any]) -> bool:
        """Whether these layers, as a graph is traced, are one op of it: what is asked here is what
        Dynamo guards, so it is asked again when it changes."""
        if self.fp8_layers is not None or not may_go_around(layers):
            return False
        weights = [layer.weight for layer in layers]
        if type(x) is not Tensor or any(type(w) is not nn.Parameter for w in weights):
            return False
        biases = [layer.bias for layer in layers if layer.bias is not None]
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights, *biases)):
            return False
        if torch.is_autocast_enabled(x.device.type) or weights[0].dtype != x.dtype:
            return False
        return packed_weights.unlike(weights, [layer.bias for layer in layers]) is None

    def _traced(self, x: Tensor, layers: Sequence[Any]) -> tuple[Tensor, ...]:
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        y = packed_gemm.JOINED(x, weights, biases, self.same_bits.number if self.exact else 0)
        return y.split_with_sizes([len(w) for w in weights], -1)


def in_turn(layers: Iterable[Any], x: Tensor) -> Tensor:
    """The layers one after the other."""
    for layer in layers:
        x = product(layer, x)
    return x


def product(layer: Any, x: Tensor) -> Tensor:
    """layer(x); a plain Linear by the algorithm that is fastest among those that give its bits."""
    if torch.compiler.is_compiling():
        return packed_gemm.CHOSEN(x, layer.weight, layer.bias) if _chooses(layer, x) else layer(x)
    if not may_go_around((layer,)):
        return layer(x)
    return algorithms.linear(x, layer.weight, layer.bias)


def _chooses(layer: Any, x: Tensor) -> bool:
    """Whether such a product is an op of a graph, which finds its algorithm when it runs."""
    if torch.is_grad_enabled() or not packed_gemm.chooses(x.device.type, x.device.index):
        return False
    if torch.is_autocast_enabled(x.device.type) or not may_go_around((layer,)):
        return False
    plain = type(x) is Tensor and type(layer.weight) is nn.Parameter
    return plain and layer.weight.dtype == x.dtype


def may_go_around(layers: Sequence[Any]) -> bool:
    """Whether nothing stands around these layers that their weights do not tell."""
    for layer in layers:
        if not is_plain(layer, nn.Linear) or "forward" in vars(layer) or hooked(layer):
            return False
        if "weight" not in layer._parameters:  # weight norm and pruning compute it
            return False
    return not all_modules_hooked()
