"""The tier "fp8": linear layers of a model's blocks as products in eight bits.

A weight is quantised when its layer first runs, and again if somebody has written to it since; the
layer keeps its own weight for everything else. The first time a layer runs, its result is held
against its own forward: if it is off by more than LIMIT, the layer stays as it is, and the report
says so.
"""

from __future__ import annotations

import math
import threading
import warnings
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn

from ..ops import fp8
from ..ops.fp8.reference import ACTIVATIONS
from . import adapters, contract
from .check import Checker, Finding, current
from .graphs.capture import capturing, depend, keep, phase
from .recipe import Forward
from .signature import written
from .slots import MARK, hooked

DOES = "product in eight bits"
# Three bits of mantissa leave an error of 2.6% (root mean square) in each operand, 3.7% in their
# product. Twice that says that rows with outliers have lost their small values.
LIMIT = 0.074
# below so many rows a layer makes a modulation or an embedding, which are sensitive and cheap
ROWS = 64
NARROWEST = 64
FIRST_IN_A_GRAPH = "a graph was recorded before it had run once"


def unfit(name: str, layer: nn.Linear) -> str | None:
    """Why a layer of a model is not meant for eight bits, or None if it is."""
    if not any(part.isdigit() for part in name.split(".")):
        return "outside the blocks: first and last layers are sensitive"
    n, k = layer.weight.shape
    if n % fp8.MULTIPLE or k % fp8.MULTIPLE or min(n, k) < NARROWEST:
        return f"its weight is {n} × {k}, which eight-bit products do not take"
    return None


def check_device(model: nn.Module) -> None:
    """Raise an error if the GPU of a model has no products in eight bits."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda" and (no := fp8.unsupported(device.index or 0)):
        raise ValueError(f'inject: numerics is "fp8", but {no}; "fused" needs less')


@dataclass
class _Layer:
    """A layer as it was quantised. `good` is None as long as nobody has looked."""

    address: int
    version: int
    moves: int
    weight: Tensor
    scale: Tensor
    good: bool | None = None

    def is_of(self, layer: Any) -> bool:
        weight = layer.weight
        return (
            self.address == weight.data_ptr()
            and self.version == weight._version
            and self.moves == adapters.moves(layer)
        )


class _Last(threading.local):
    """The rows that this thread quantised last: query, key and value are made of the same."""

    source: ref[Tensor] | None = None
    facts: tuple[int, int] = (0, 0)
    rows: tuple[Tensor, Tensor] | None = None


_last = _Last()


@dataclass(eq=False)
class EightBits:
    """The layers of one injection."""

    checker: Checker
    _layers: WeakKeyDictionary[nn.Module, _Layer] = field(default_factory=WeakKeyDictionary)
    _left: WeakSet[nn.Module] = field(default_factory=WeakSet)

    def forward(self) -> Forward:
        """The forward that all layers share."""

        def forward(layer: Any, input: Tensor) -> Tensor:
            y = self(layer, input)
            return type(layer).forward(layer, input) if y is None else y

        setattr(forward, MARK, self)
        return forward

    def add(self, layer: nn.Module, name: str) -> None:
        self.checker.names[layer] = name

    def leave(self, layer: nn.Module, why: str) -> None:
        """Let a layer run as it is."""
        if self._has(layer) and layer not in self._left:
            self._left.add(layer)
            self.checker.misfits[layer] = why

    def wanted(self, layer: nn.Module) -> bool:
        """Whether a layer is to run in eight bits, here and now."""
        if torch.compiler.is_compiling() or current.eager or not current.eight_bits:
            return False
        kept = self._layers.get(layer)
        usable = kept is None or kept.good is not False
        return usable and self._has(layer) and layer not in self._left

    def _has(self, layer: nn.Module) -> bool:
        """Whether a layer was given to this injection, or is a copy of one that was."""
        return getattr(layer.__dict__.get("forward"), MARK, None) is self

    def __call__(
        self, layer: Any, x: Tensor, activation: str = "none", up: Tensor | None = None
    ) -> Tensor | None:
        """layer(act(x) * up), or None where that is not for eight bits."""
        if not self.wanted(layer):
            return None
        if why := _misfit(layer, x):
            self.checker.misfits[layer] = why
            return None
        kept = self._layers.get(layer)
        if kept is None or not kept.is_of(layer):
            if capturing():
                self.checker.misfits[layer] = FIRST_IN_A_GRAPH
                return None
            adapters.watch(layer)
            weight = layer.weight
            facts = weight.data_ptr(), weight._version, adapters.moves(layer)
            kept = self._layers[layer] = _Layer(*facts, *fp8.quantize_weight(weight))
        if kept.good is None:
            if not capturing():
                return self._first_sight(layer, kept, x, activation, up)
            self.checker.misfits[layer] = FIRST_IN_A_GRAPH
            return None
        depend(layer.weight)
        keep(kept)
        return _product(layer, kept, x, activation, up)

    def _first_sight(
        self, layer: Any, kept: _Layer, x: Tensor, activation: str, up: Tensor | None
    ) -> Tensor:
        y = ACTIVATIONS[activation](x)
        expected = type(layer).forward(layer, y if up is None else y * up)
        result = _product(layer, kept, x, activation, up)
        error = contract.error(result, expected)
        kept.good = error <= LIMIT
        problem = None
        if not kept.good:
            # the weight stays what it is: no memory for a copy that is not used
            kept.weight = kept.scale = torch.empty(0)
            problem = f"off by {error:.1%} in eight bits" if math.isfinite(error) else "not finite"
        name = self.checker.names.get(layer, "a Linear")
        inputs = written((x,), {})
        sites = {(DOES, problem or "fused"): 1}
        self.checker.findings.append(
            Finding(name, "Linear", inputs, sites, error=error, problem=problem)
        )
        if problem:
            warnings.warn(f"{name} at {inputs}: {problem}; that stays eager", stacklevel=4)
        return result if kept.good else expected


def _misfit(layer: Any, x: Tensor) -> str | None:
    """Why this call of a layer is not for eight bits, or None if it is."""
    weight = layer.weight
    if type(weight) is not nn.Parameter or type(x) is not Tensor or weight.is_inference():
        return "tensors of a class of their own"
    if hooked(layer):
        return "a hook wants to see it being called"
    if adapters.is_wrapped(layer):
        return "an adapter is around it"
    if x.numel() < ROWS * x.shape[-1]:
        return f"fewer than {ROWS} rows"
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return "gradients are recorded"
    if x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
        return "its dtype changes"
    if not x.is_cuda:
        return None  # emulated
    return fp8.problem(x.device, x.dtype, weight.shape, layer.bias)


def _product(layer: Any, kept: _Layer, x: Tensor, activation: str, up: Tensor | None) -> Tensor:
    if activation == "none" and up is None:
        rows, scale = _rows(x)
    else:
        rows, scale = fp8.quantize(x, up, activation)
    return fp8.product(rows, scale, kept.weight, kept.scale, layer.bias, x.dtype)


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in eight bits, made once for all layers that are given it one after the other."""
    if x.is_inference():  # such tensors do not count who writes to them
        return fp8.quantize(x)
    last, facts = None if _last.source is None else _last.source(), (x._version, phase())
    if last is x and _last.facts == facts and _last.rows is not None:
        return _last.rows
    rows = fp8.quantize(x)
    _last.source, _last.facts, _last.rows = ref(x), facts, rows
    return rows
