"""The tier "fp8": linear layers of a model's blocks as fp8 GEMMs.

A layer that is given few rows, such as a modulation, has its weight as int8 and its rows in 16
bits: half the memory, with a third of the error of fp8.

A weight is quantised when its layer first runs, and again after somebody has written to it. The
first time a layer runs, its result is compared with its own forward: if it is off by more than
LIMIT, the layer stays as it is, and the report says so. Otherwise its 16-bit weight leaves the GPU,
see resting.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...backends.torch_internals import in_functorch
from ...backends.user_warnings import warn
from ...library_internals import base_layer, peft_children
from ...ops import fp8
from ...ops.few_rows import is_few
from ..graphs.capture import capturing, depend, keep
from ..runtime import forwards
from ..runtime.forwards import MARK, hooked
from ..runtime.informative import informative
from ..runtime.input_key import in_words
from ..runtime.sites import Forward, mode
from ..state.tensor_samples import TensorSamples
from ..verify import accuracy
from ..verify.findings import Finding
from ..verify.first_sight import Checker
from .activations import Makers, keep_rows, rows_of
from .attention import Fp8Attention
from .compiled import FP8_LINEAR, LayersByWeight, number
from .few_rows import activated, of_few_rows
from .memory_blocks import GpuBlocks
from .resting import Resting, weight_of
from .suitable_layers import is_short, misfit
from .weights import Pack, Quantised, quantise

DOES, KIND = "fp8 GEMM", "Linear"
DOES_FEW_ROWS, KIND_FEW_ROWS = "int8 weight", "Linear of few rows"
# Three bits of mantissa leave an error of 2.6% (root mean square) in each operand, 3.7% in their
# product; integers leave 0.9% in a weight of normal distribution. Twice that means that outliers in
# a row have cost its small values.
LIMIT, LIMIT_INTEGERS = 0.074, 0.018
DROPPED = "its 16-bit weight was dropped, and its int8 weight is for few rows"
FIRST_IN_A_GRAPH = "a graph was recorded before it had run once"


@dataclass(eq=False)
class Fp8Layers:
    """The quantised layers of one injection."""

    checker: Checker
    samples: TensorSamples
    _layers: WeakKeyDictionary[nn.Module, Quantised] = field(default_factory=WeakKeyDictionary)
    # norms and GELUs that quantise what they return for the layers behind them
    makers: Makers = field(default_factory=Makers)
    _packs: WeakKeyDictionary[nn.Module, Pack] = field(default_factory=WeakKeyDictionary)
    _left: WeakSet[nn.Module] = field(default_factory=WeakSet)
    # where the fp8 weights are, and the 16-bit ones meanwhile
    memory: GpuBlocks = field(default_factory=GpuBlocks)
    resting: Resting = field(default_factory=Resting)
    _by_weight: LayersByWeight = field(default_factory=LayersByWeight)

    def __post_init__(self) -> None:
        self.number = number(self)
        self._class_forward = nn.Linear.forward  # others may replace it later
        self.attention = Fp8Attention(self.checker)

    def __deepcopy__(self, memo: Any) -> Fp8Layers:
        return self  # copies of a model share their forwards, too

    def forward(self) -> Forward:
        """The forward that all layers share."""

        def forward(layer: Any, input: Tensor) -> Tensor:
            y = self(layer, input)
            return self.in_16_bits(layer, input) if y is None else y

        forward.__wrapped__ = self._class_forward  # type: ignore[attr-defined]
        setattr(forward, MARK, self)
        return forward

    def add(self, layer: nn.Linear, name: str) -> None:
        self.checker.names[layer] = name
        self.memory.expected += layer.weight.numel()

    def leave(self, layer: nn.Module, why: str) -> None:
        """Let a layer run in 16 bits."""
        if self._has(layer) and layer not in self._left:
            self._left.add(layer)
            self.checker.misfits[layer] = why
            self.fetch(layer)
            if not capturing() and not in_functorch():
                self.resting.settle(layer, self.memory)

    def in_16_bits(self, layer: Any, x: Tensor) -> Tensor:
        """layer(x) by its own forward, with its weight on the device of x."""
        own = forwards.class_forward(layer, self._class_forward)
        if torch.compiler.is_compiling():
            return own(layer, x)
        weight = weight_of(layer)
        if self.resting.is_at_rest(layer):
            if self.resting.is_dropped(layer):  # what is left of it
                kept = self._layers[layer]
                return F.linear(x, (kept.weight.float() * kept.scale).to(x.dtype), layer.bias)
            # what is made inside a transform of torch.func is not to outlive it
            if self.resting.home_of(layer) == x.device and not capturing() and not in_functorch():
                self.fetch(layer)
        if weight is None and self.resting.is_home(x.device):
            self.resting.refuse_dropped([layer], "a parametrization")
            self.resting.move(layer, x.device)  # a parametrization has the weight
        if not isinstance(weight, Tensor) or weight.device == x.device:
            return own(layer, x)
        if weight.device.type != "cpu" or not self.resting.is_home(x.device):
            return own(layer, x)
        # of a copy of the model, or made by others of a weight that rested
        return own(_with_weight(layer, weight.to(x.device)), x)

    def fetch(self, *layers: Any) -> bool:
        """Have the 16-bit weights of these layers on the GPU; False if one was dropped. They leave
        again when their layers run in fp8."""
        there = True
        for layer in layers:
            if not self.resting.is_at_rest(layer):
                continue
            kept = self._layers.get(layer)
            current = kept is not None and kept.is_of(layer, self.samples)
            there = self.resting.wake(layer, self.samples.epoch) and there
            if kept is not None and current:
                kept.remade(layer, self.samples)
        return there

    def fetch_all(self, root: nn.Module) -> None:
        """Have the 16-bit weights of all layers inside `root` on the GPU."""
        self.fetch(*[m for m in root.modules() if self._has(m)])

    def _let_rest(self, layer: Any, kept: Quantised) -> None:
        """Move the 16-bit weight of a layer that runs in fp8 off the GPU."""
        if not capturing() and not in_functorch() and self.resting.is_due(layer):
            self.resting.rest(layer, self.samples.epoch)
            kept.remade(layer, self.samples)

    def follow_adapters(self, model: nn.Module, on_gpu: bool) -> None:
        """Bring back the weights that adapters were put around, if the model runs where they were.
        peft creates an adapter on the device of the weight, so it comes along."""
        for module in model.modules():
            layer: Any = base_layer(module)
            if layer is None or not self._has(layer):
                continue
            home = self.resting.home_of(layer)
            weight = weight_of(layer)
            if home is None or (home.type == "cuda") is not on_gpu:
                continue
            if weight is not None and weight.device == home and not self.resting.is_at_rest(layer):
                continue
            self.fetch(layer)
            for child in peft_children(module):
                child.to(home)

    def wanted(self, layer: nn.Module) -> bool:
        """Whether a layer is to run in fp8, here and now."""
        if torch.compiler.is_compiling():
            return self._may_trace(layer)
        return not mode.eager and mode.fp8 and self.expected(layer)

    def expected(self, layer: nn.Module) -> bool:
        """Whether a layer is to run in fp8 in general, as far as is known."""
        kept = self._layers.get(layer)
        usable = kept is None or kept.good is not False
        return usable and self._has(layer) and layer not in self._left

    def _may_trace(self, layer: Any) -> bool:
        """Whether torch.compile may trace a layer as an op, which then decides when it runs."""
        if torch.is_grad_enabled() or "forward" not in layer.__dict__:
            return False
        return getattr(layer.__dict__["forward"].__func__, MARK, None) is self

    def layer_of(self, weight: Tensor) -> Any:
        """The layer that has this weight, or None."""
        return self._by_weight.find(weight, [m for m in self.checker.names if self._has(m)])

    def _has(self, layer: nn.Module) -> bool:
        """Whether a layer was given to this injection, or is a copy of one that was."""
        return getattr(layer.__dict__.get("forward"), MARK, None) is self

    def __call__(
        self,
        layer: Any,
        x: Tensor,
        activation: str = "none",
        up: Tensor | None = None,
        left: Tensor | None = None,
    ) -> Tensor | None:
        """layer(act(x) * up) in fp8, or None where it must run in 16 bits. With `left`, the layer's
        input is the concatenation of that and act(x) * up."""
        if torch.compiler.is_compiling():
            mixed = torch.is_autocast_enabled(x.device.type) or x.dtype != layer.weight.dtype
            if mixed or type(x) is not Tensor or not self._may_trace(layer):
                return None
            return FP8_LINEAR(x, layer.weight, layer.bias, activation, up, left, self.number)
        return self.run(layer, x, activation, up, left)

    def run(
        self,
        layer: Any,
        x: Tensor,
        activation: str = "none",
        up: Tensor | None = None,
        left: Tensor | None = None,
        rest: bool = True,
    ) -> Tensor | None:
        """The same outside of a trace; `rest`: the 16-bit weight may leave the GPU."""
        if not self.wanted(layer):
            return None
        kept = self._layers.get(layer)
        integers = not self.reads_rows(x) and (kept is None or kept.integers or kept.good is None)
        seen = kept is not None and kept.good is True and not kept.integers
        why = misfit(layer, x, seen or integers)
        if kept is not None and kept.integers and not integers and self.resting.is_dropped(layer):
            why = why or DROPPED
        if why:
            self.checker.misfits[layer] = why
            return None
        fits = kept is not None and self._fits(kept, layer, x.device, integers)
        if kept is None or not fits or kept.good is None:
            if capturing():
                self.checker.misfits[layer] = FIRST_IN_A_GRAPH
                return None
            kept = self._quantised(layer, x.device, integers)
        depend(layer.weight)
        keep(kept)
        plain = activation == "none" and up is None and left is None
        y = None
        if integers or (kept.good and is_short(x)):
            given = x if plain else activated(x, activation, up, left)
            y = of_few_rows(kept, given, layer.bias)
            if y is None and integers:
                self.checker.misfits[layer] = "no kernel for its few rows"
                return None
        if y is None:
            rows, scale = rows_of(x) if plain else fp8.quantize(x, up, activation, left)
            y = fp8.product(rows, scale, kept.weight, kept.scale, layer.bias, x.dtype)
        if kept.good is None:
            given = activated(x, activation, up, left)
            y = self._first_sight(layer, kept, given, y)
        if kept.good and rest:
            self._let_rest(layer, kept)
        return y

    @staticmethod
    def reads_rows(x: Tensor) -> bool:
        """Whether a layer quantises its input: few rows stay in 16 bits."""
        return not (is_few(x) and is_short(x))

    @staticmethod
    def rows_made(x: Tensor, rows: Tensor, scale: Tensor) -> None:
        """Take x in eight bits from the kernel that made it, for the layers that are given x."""
        keep_rows(x, (rows, scale))

    def together(self, layers: Sequence[Any], x: Tensor) -> tuple[Tensor, ...] | None:
        """layer(x) of each layer as one fp8 GEMM, whose result is split; None where some layer must
        run in 16 bits: the others may still run in fp8 one by one."""
        pack = self._pack(layers, x)
        if pack is None:
            return None
        y = None
        if pack.is_good and is_short(x):
            y = of_few_rows(pack, x, pack.bias)
        if y is None:
            y = fp8.product(*rows_of(x), pack.weight, pack.scale, pack.bias, x.dtype)
        results = y.split_with_sizes([m.out_features for m in layers], -1)
        if not pack.is_good:
            results = self._first_sight_together(layers, pack, x, results)
        if pack.is_good:
            for layer, kept in zip(layers, pack.layers, strict=True):
                self._let_rest(layer, kept)
        return results

    def gated(self, layers: Sequence[Any], x: Tensor) -> Tensor | None:
        """SiLU(gate(x)) * up(x) of two layers for few rows x; None where they have not run in fp8
        yet, or cannot here."""
        if torch.compiler.is_compiling() or any(m.bias is not None for m in layers):
            return None
        pack = self._pack(layers, x)
        if pack is None or not pack.is_good or not is_short(x):
            return None
        if layers[0].out_features != layers[1].out_features:
            return None
        return of_few_rows(pack, x, None, gated=True)

    def _pack(self, layers: Sequence[Any], x: Tensor) -> Pack | None:
        """The weights of these layers in fp8, one after the other; None where some layer must run
        in 16 bits."""
        kept = [self._layers.get(m) for m in layers]
        seen = all(k is not None and k.good is True and not k.integers for k in kept)
        if not all(map(self.wanted, layers)) or any(misfit(m, x, seen) for m in layers):
            return None
        if len({m.bias is None for m in layers}) > 1:
            return None
        pack = self._packs.get(layers[0])
        if pack is None or pack.weight.device != x.device or not self._is_pack_of(pack, layers):
            if capturing():
                return None
            quantised = [self._quantised(m, x.device) for m in layers]
            pack = self._packs[layers[0]] = Pack.of(layers, quantised, self.samples, self.memory)
        for layer in layers:
            depend(layer.weight)
            if layer.bias is not None:
                depend(layer.bias)
        keep(pack)
        return pack

    def _fits(
        self, kept: Quantised, layer: Any, device: torch.device, integers: bool = False
    ) -> bool:
        """Whether an eight-bit weight is still that of its layer, on the device it is needed on."""
        if kept.integers is not integers:
            return False
        if kept.is_of(layer, self.samples):
            # a dropped weight cannot be quantised again; a refused one is empty
            return kept.good is False or kept.weight.device == device
        return self.resting.is_dropped(layer) and kept.weight.device == device

    def _is_pack_of(self, pack: Pack, layers: Sequence[Any]) -> bool:
        return pack.is_of(layers, [self._layers.get(m) for m in layers], self.samples)

    def may_place(self, layer: nn.Module) -> bool:
        """Whether the weight of a layer need never be on the GPU."""
        return self._has(layer) and not hooked(layer) and layer not in self.resting.staying

    def quantise_now(self, layer: Any, device: torch.device) -> None:
        """Quantise a layer that has not run yet and that is not on `device`, where it will run."""
        kept = self._layers[layer] = quantise(layer, self.samples, device, self.memory)
        self.resting.place(layer, device)
        kept.remade(layer, self.samples)

    def _quantised(self, layer: Any, device: torch.device, integers: bool = False) -> Quantised:
        """A layer as it is now."""
        kept = self._layers.get(layer)
        if kept is None or not self._fits(kept, layer, device, integers):
            # a weight that was quantised ahead, and has not been used
            unused = kept.weight if kept is not None and kept.good is None else None
            kept = quantise(layer, self.samples, device, self.memory, integers, unused)
            self._layers[layer] = kept
        return kept

    def _first_sight_together(
        self, layers: Sequence[Any], pack: Pack, x: Tensor, results: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The results, if no layer is refused; else these layers no longer share one GEMM."""
        seen = tuple(
            result if k.good else self._first_sight(layer, k, x, result)
            for layer, k, result in zip(layers, pack.layers, results, strict=True)
        )
        if all(k.good for k in pack.layers):
            return seen
        del self._packs[layers[0]]
        return tuple(
            layer(x) if k.good else y for layer, k, y in zip(layers, pack.layers, seen, strict=True)
        )

    def _first_sight(self, layer: Any, kept: Quantised, x: Tensor, result: Tensor) -> Tensor:
        """The fp8 result, or that of the layer's own forward if it is too far off."""
        weight = layer.weight
        if weight.device == x.device:
            expected = type(layer).forward(layer, x)
        else:
            expected = F.linear(x, weight.to(x.device), layer.bias)
        if not informative(expected):
            return expected  # zeros and NaN prove nothing: compare again at the next call
        error = accuracy.error(result, expected)
        kept.good = error <= (LIMIT_INTEGERS if kept.integers else LIMIT)
        problem = None
        does, kind = (DOES_FEW_ROWS, KIND_FEW_ROWS) if kept.integers else (DOES, KIND)
        if not kept.good:
            # free the quantised copy, which nobody uses
            kept.weight = kept.scale = torch.empty(0)
            how = "as int8" if kept.integers else "in fp8"
            problem = f"off by {error:.1%} {how}" if math.isfinite(error) else "not finite"
        name = self.checker.names.get(layer, "a Linear")
        inputs = in_words((x,), {})
        sites = {(does, problem or "fused"): 1}
        self.checker.findings.append(
            Finding(name, kind, inputs, sites, error=error, problem=problem)
        )
        if problem:
            warn(f"{name} at {inputs}: {problem}; that stays eager")
        return result if kept.good else expected


def _with_weight(layer: Any, weight: Tensor) -> Any:
    """A layer like this one, with another weight."""
    other = copy.copy(layer)
    other._parameters = dict(layer._parameters)
    holder = other._parameters if "weight" in layer._parameters else other.__dict__
    holder["weight"] = weight
    return other
