"""Products of recorded blocks: by the fastest algorithm, in fp8, several of one input as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...fuser.recorded_ops import LINEARS
from ...fuser.recording import Recording
from ...ops.fp8.reference import activated
from ...ops.linear import algorithms
from ...ops.linear.plain import separate_linears
from . import packed_weights
from .packed_gemm import SameBits, packed_linear, projections


class _Running(threading.local):
    """The module whose programs run in this thread."""

    layers: Mapping[str, nn.Module] = {}


running = _Running()


@dataclass(eq=False)
class ProgramProducts:
    """Computes the linear layers of one injection. Without `same_bits` none are joined."""

    exact: bool
    fp8_layers: Any
    same_bits: SameBits | None

    def of(self, weights: Sequence[str]) -> Callable[..., Any]:
        """Linear layers: in fp8 if they are, else by the fastest algorithm."""
        if len(weights) > 1:
            return partial(self._together, weights)
        if self.fp8_layers is None:
            return algorithms.CallSite()
        return partial(self._fp8_product, weights[0])

    def _fp8_product(
        self,
        weight: str,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        activation: str = "none",
        up: Tensor | None = None,
        left: Tensor | None = None,
    ) -> Tensor:
        """A linear layer of [left, act(x) * up], in fp8 if it is in fp8."""
        layer: Any = running.layers.get(weight)
        if layer is not None:
            y = self.fp8_layers(layer, x, activation, up, left)
            if y is not None:
                return y
        if activation != "none":
            x = activated(x, activation, up, left)
        if layer is None:
            return algorithms.linear(x, w, bias)
        # the weight as it was given may be the one that has left the GPU
        there = self.fp8_layers.fetch(layer)
        if not there or layer.weight.device != x.device:
            return self.fp8_layers.in_16_bits(layer, x)
        return algorithms.linear(x, layer.weight, bias)

    def _together(
        self, names: Sequence[str], x: Tensor, weights: list[Tensor], biases: list[Tensor]
    ) -> Sequence[Tensor]:
        """Layers of one input: parts of one tensor, as one product where possible."""
        sizes = [len(w) for w in weights]
        if self.fp8_layers is None:
            exact = self.same_bits.id if self.exact and self.same_bits is not None else 0
            return projections(x, weights, biases, exact).split_with_sizes(sizes, -1)
        layers = [running.layers[name] for name in names]
        y = self.fp8_layers.together(layers, x)
        if y is None:
            own = biases or (None,) * len(weights)
            given = zip(names, weights, own, strict=True)
            parts = [self._fp8_product(name, x, w, b) for name, w, b in given]
            y = torch.cat(parts, -1).split_with_sizes(sizes, -1)
        return y

    def join(
        self, module: nn.Module, made: Recording, inputs: Sequence[Tensor], nodes: list[fx.Node]
    ) -> bool:
        """Whether these linear layers of one input are faster as one product, in `exact` with the
        bits of several."""
        if self.same_bits is None:
            return False
        own = dict(zip(made.graph.find_nodes(op="placeholder"), inputs, strict=True))
        layers = layers_of(module, made)
        weights = [own.get(n.args[1]) for n in nodes]
        biases = [None if n.args[2] is None else own.get(n.args[2]) for n in nodes]
        if any(w is None for w in weights) or any(n.args[1].name not in layers for n in nodes):
            return False
        if self.fp8_layers is not None:
            return all(self.fp8_layers.expected(layers[n.args[1].name]) for n in nodes)
        like = nodes[0].args[0].meta["val"]
        if packed_weights.why_unlike(weights, biases) or not like.is_contiguous():
            return False
        return not self.exact or self._have_same_bits(like, weights, biases)

    def quantises(self, module: nn.Module, made: Recording, node: fx.Node) -> bool:
        """Whether a linear layer, or several of one input, are to run in fp8."""
        if self.fp8_layers is None:
            return False
        weights = node.args[1] if node.target is LINEARS else [node.args[1]]
        layers = layers_of(module, made)
        found = [layers.get(w.name) for w in weights]
        return all(m is not None and self.fp8_layers.expected(m) for m in found)

    def reads_rows(self, module: nn.Module, made: Recording, node: fx.Node) -> bool:
        """Whether a linear layer, or several of one input, read that input in eight bits."""
        x = node.args[0].meta["val"]
        return self.quantises(module, made, node) and self.fp8_layers.reads_rows(x)

    def whole(
        self,
        made: Recording,
        inputs: Sequence[Tensor],
        layer: fx.Node,
        rows: Tensor,
        first: int,
        count: int,
    ) -> bool:
        """Whether a linear layer of some tokens may be a part of that of all rows: in `exact` if it
        then has the same bits, tried on random numbers."""
        weight = _value_of(layer.args[1], made, inputs)
        if self.same_bits is None or weight is None:
            return False
        if not self.exact:
            return True
        drawn = torch.Generator(rows.device).manual_seed(0)
        x = torch.randn(rows.shape, dtype=rows.dtype, device=rows.device, generator=drawn)
        return self.same_bits(
            "some tokens",
            x,
            (first, count, len(weight)),
            False,
            lambda: (F.linear(x, weight).narrow(1, first, count),) * 2,
            lambda: _as_pytorch_might(x.narrow(1, first, count), weight),
        )

    def copied(
        self, made: Recording, inputs: Sequence[Tensor], layer: fx.Node, by_program: bool
    ) -> bool:
        """Whether a linear layer shall read its input as rows, which a program computes, or PyTorch
        would copy: in `exact` if it then has the same bits, tried on random numbers."""
        like, bias = layer.args[0].meta["val"], layer.args[2]
        weight = _value_of(layer.args[1], made, inputs)
        if weight is None or not (by_program or weight.requires_grad):
            return False
        if not self.exact:
            return True
        if self.same_bits is None or bias is not None:
            return False
        drawn = torch.Generator(like.device).manual_seed(0)
        x = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        x.normal_(generator=drawn)
        return self.same_bits(
            "rows of its own",
            x,
            (len(weight),),
            False,
            lambda: (F.linear(x.contiguous(), weight),) * 2,
            lambda: _as_pytorch_might(x, weight),
        )

    def _have_same_bits(self, like: Tensor, weights: list[Any], biases: list[Any]) -> bool:
        """Whether one product of layers sums in the order of several, tried on random numbers."""
        assert self.same_bits is not None
        # numbers of its own: those that the user draws next must be the same as without this
        own = torch.Generator(like.device).manual_seed(0)
        x = torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=own)
        biases = [b for b in biases if b is not None]
        packed = packed_weights.packed_weights(weights, biases, x)
        if isinstance(packed, str):
            return False
        return self.same_bits(
            "one",
            x,
            packed.sizes,
            bool(biases),
            lambda: packed_linear(x, packed).split_with_sizes(packed.sizes, -1),
            lambda: tuple(separate_linears(x, weights, biases)),
        )


def layers_of(root: nn.Module, made: Recording) -> dict[str, nn.Module]:
    """The linear layers of a module by the names that their weights have in its graph."""
    inputs = [n.name for n in made.graph.find_nodes(op="placeholder")]
    found: dict[str, nn.Module] = {}
    for node, name in zip(inputs, made.weights, strict=False):
        path, _, last = name.rpartition(".")
        layer = root.get_submodule(path)
        if last == "weight" and type(layer) is nn.Linear:
            found[node] = layer
    return found


def _value_of(node: Any, made: Recording, inputs: Sequence[Tensor]) -> Tensor | None:
    """An input of a recording."""
    own = dict(zip(made.graph.find_nodes(op="placeholder"), inputs, strict=True))
    return own.get(node)


def _as_pytorch_might(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """F.linear of rows with gaps: it copies them for a weight that requires a gradient, even where
    none is recorded, and multiplies batch by batch for any other. A user may change which it is."""
    own = weight.detach()
    return F.linear(x, own), F.linear(x, own.detach().requires_grad_())
