"""Writing a module's forward down as a graph of ATen ops, for one signature of its inputs.

Parameters and buffers are inputs of the graph, so that one graph serves every module of a class.
Linear layers, attention and F.rms_norm stay single ops, whatever PyTorch makes of them. What cannot
be written down raises `CannotRecord` with the reason: a value read on the host, random numbers,
tensors of a class of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from ..backends.torch_internals import pytree
from ..ops import library


class CannotRecord(Exception):
    """Why a forward cannot be written down."""


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped
    )


def plain_rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    return F.rms_norm(x, shape, weight, eps)


LINEAR = library.define(
    "recorded_linear",
    "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    F.linear,
    lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
)
ATTENTION = library.define(
    "recorded_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout, bool causal, "
    "float? scale, bool grouped) -> Tensor",
    plain_attention,
    lambda query, key, value, *_: query.new_empty(*query.shape[:-1], value.shape[-1]),
)
RMS_NORM = library.define(
    "recorded_rms_norm",
    "(Tensor x, int[] shape, Tensor? weight, float? eps) -> Tensor",
    plain_rms_norm,
    lambda x, shape, weight, eps: torch.empty_like(x, memory_format=torch.contiguous_format),
)


class _Whole(TorchFunctionMode):
    """Keeps functions whole that PyTorch would write down as their parts."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (kept := _KEPT.get(function)) is not None:
            return kept(*args, **kwargs)
        return function(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return LINEAR(input, weight, bias)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p:
        raise CannotRecord("attention with dropout")
    return ATTENTION(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)


def _rms(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return RMS_NORM(input, list(normalized_shape), weight, eps)


_KEPT: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.scaled_dot_product_attention: _sdpa,
    F.rms_norm: _rms,
    torch.rms_norm: _rms,
}


@dataclass
class Recording:
    """A graph, and how the inputs of a call become its inputs."""

    graph: fx.Graph
    weights: tuple[str, ...]  # names of the parameters and buffers that come first
    positions: tuple[int, ...]  # which of the flattened arguments are tensors
    returns: Any  # the structure of the result
    # tensors that the forward reads and is not given: attributes that are no buffers, globals
    constants: dict[str, Tensor]

    def inputs(self, module: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
        leaves = pytree.tree_leaves((args, kwargs))
        named = _weights(module)
        return [*(named[n] for n in self.weights), *(leaves[i] for i in self.positions)]

    def result(self, outputs: list[Any]) -> Any:
        return pytree.tree_unflatten(outputs, self.returns)


def record(module: nn.Module, args: Any, kwargs: Any) -> Recording:
    """Run the forward of a module once, and write down what it does."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    positions = tuple(i for i, x in enumerate(leaves) if isinstance(x, Tensor))
    weights = _weights(module)
    returned: list[Any] = []

    def run(*tensors: Tensor) -> Any:
        named = dict(zip(weights, tensors[: len(weights)], strict=True))
        given = list(leaves)
        for place, tensor in zip(positions, tensors[len(weights) :], strict=True):
            given[place] = tensor
        a, k = pytree.tree_unflatten(given, structure)
        with _Whole():
            result = torch.func.functional_call(module, named, a, k)
        outputs, spec = pytree.tree_flatten(result)
        returned[:] = [spec]
        return outputs

    tensors = [*weights.values(), *(leaves[i] for i in positions)]
    for t in tensors:
        if type(t) not in (Tensor, nn.Parameter, nn.Buffer):
            raise CannotRecord(f"a tensor of the class {type(t).__name__}")
    try:
        with torch.no_grad():
            made = make_fx(torch.func.functionalize(run, remove="mutations"))(*tensors)
    except CannotRecord:
        raise
    except Exception as error:
        raise CannotRecord(str(error).strip().partition("\n")[0]) from error
    graph, constants = made.graph, {}
    for node in graph.nodes:
        if node.op == "get_attr":
            constants[node.name] = getattr(made, node.target)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CannotRecord(f"random numbers ({node.target})")
    graph.eliminate_dead_code()
    return Recording(graph, tuple(weights), positions, returned[0], constants)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
