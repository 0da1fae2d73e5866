"""Linear layers: those that share an input as one GEMM, others by the fastest algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...backends.torch_internals import all_modules_hooked
from ...ops import few_rows
from ...ops.linear import algorithms
from ..reuse import packed_gemm, packed_weights
from ..runtime.forwards import hooked
from ..runtime.sites import declined, site
from ..state.hooks import is_plain
from .base import BaseFusions

QKV = "QKV in one product"
TEXT_QKV = "QKV of the text in one product"
GATE_UP = "gate and up in one product"
OTHER_BITS = "its sums are in another order than those of the separate layers"


class ProjectionFusions(BaseFusions):
    def projections(self, name: str, x: Tensor, layers: Sequence[Any]) -> tuple[Tensor, ...]:
        """layer(x) of each layer: views into the result of one GEMM, with its row stride. `exact`
        does so only where cuBLAS sums that GEMM in the order of the separate ones, which is checked
        once for each shape."""

        def eager() -> tuple[Tensor, ...]:
            return tuple([layer(x) for layer in layers])

        if torch.compiler.is_compiling():
            return (
                self._traced_projections(x, layers)
                if self._may_trace_projections(x, layers)
                else eager()
            )
        if self.fp8_layers is not None:  # also where some layers are refused
            eight = None if all_modules_hooked() else self.fp8_layers.together(layers, x)
            return eager() if eight is None else eight
        if not may_bypass(layers):
            declined(name, "an adapter or a hook is on one of its layers")
            return eager()
        packed = packed_weights.packed(layers, x)
        if isinstance(packed, str):
            declined(name, packed)
            return eager()

        def kernel() -> tuple[Tensor, ...]:
            if self.may_sum_otherwise and few_rows.suits(x, packed.weight, packed.bias):
                y = few_rows.LINEAR_FEW_ROWS(x, packed.weight, packed.bias, False)
            else:
                y = packed_gemm.packed_linear(x, packed)
            return y.split_with_sizes(packed.sizes, -1)

        bias = packed.bias is not None
        if self.exact and not self.same_bits("one", x, packed.sizes, bias, kernel, eager):
            declined(name, OTHER_BITS)
            return eager()
        return site(name, eager, kernel, x)

    def _may_trace_projections(self, x: Tensor, layers: Sequence[Any]) -> bool:
        """Whether torch.compile may trace these layers as one op. Dynamo guards all that is read
        here, so a change leads to a new trace."""
        if self.fp8_layers is not None or not may_bypass(layers):
            return False
        weights = [layer.weight for layer in layers]
        if type(x) is not Tensor or any(type(w) is not nn.Parameter for w in weights):
            return False
        biases = [layer.bias for layer in layers if layer.bias is not None]
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights, *biases)):
            return False
        if torch.is_autocast_enabled(x.device.type) or weights[0].dtype != x.dtype:
            return False
        return packed_weights.why_unlike(weights, [layer.bias for layer in layers]) is None

    def _traced_projections(self, x: Tensor, layers: Sequence[Any]) -> tuple[Tensor, ...]:
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        y = packed_gemm.PROJECTIONS(x, weights, biases, self.same_bits.id if self.exact else 0)
        return y.split_with_sizes([len(w) for w in weights], -1)


def run_in_order(layers: Iterable[Any], x: Tensor) -> Tensor:
    """Run the layers one after the other."""
    for layer in layers:
        if not is_no_dropout(layer):
            x = run_linear(layer, x)
    return x


def is_no_dropout(layer: Any) -> bool:
    """Whether a layer is a Dropout that returns its input unchanged and need not be called."""
    if not is_plain(layer, nn.Dropout) or (layer.training and layer.p):
        return False
    return not hooked(layer) and not all_modules_hooked()


def run_linear(layer: Any, x: Tensor) -> Tensor:
    """layer(x); a plain Linear by the fastest GEMM algorithm that gives the same bits."""
    if torch.compiler.is_compiling():
        return (
            packed_gemm.TUNED_LINEAR(x, layer.weight, layer.bias)
            if _may_trace_linear(layer, x)
            else layer(x)
        )
    if not may_bypass((layer,)):
        return layer(x)
    own = layer._parameters  # faster than through nn.Module.__getattr__
    return algorithms.linear(x, own["weight"], own["bias"])


def _may_trace_linear(layer: Any, x: Tensor) -> bool:
    """Whether torch.compile may trace this layer as an op that picks its algorithm when it runs."""
    if torch.is_grad_enabled() or not packed_gemm.is_tuned(x.device.type, x.device.index):
        return False
    if torch.is_autocast_enabled(x.device.type) or not may_bypass((layer,)):
        return False
    plain = type(x) is Tensor and type(layer.weight) is nn.Parameter
    return plain and layer.weight.dtype == x.dtype


def may_bypass(layers: Sequence[Any]) -> bool:
    """Whether F.linear with their weights may replace calling these layers: no adapter, no hook."""
    for layer in layers:
        if not is_plain(layer, nn.Linear) or "forward" in layer.__dict__ or hooked(layer):
            return False
        own = layer._parameters
        if "weight" not in own or "bias" not in own:  # weight norm and pruning compute it
            return False
    return not all_modules_hooked()
