"""Ops that stay whole in recorded graphs: linear layers, attention, F.rms_norm, opaque layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..ops import library
from ..ops.fp8.reference import activated
from ..ops.linear import linear_gelu
from ..ops.linear.parts import linear_of_parts
from ..ops.linear.plain import separate_linears

# what PyTorch chooses the kernel of an attention from
SDP_BACKENDS = (
    (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.flash_sdp_enabled),
    (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.mem_efficient_sdp_enabled),
    (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.cudnn_sdp_enabled),
    (SDPBackend.MATH, torch.backends.cuda.math_sdp_enabled),
)


def sdp_backends() -> list[int]:
    """The numbers of the backends that may be chosen now."""
    return [i for i, (_, enabled) in enumerate(SDP_BACKENDS) if enabled()]


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
    backends: Sequence[int] = (),
) -> Tensor:
    """F.scaled_dot_product_attention; of these backends only, if a forward has chosen any."""
    chosen = [SDP_BACKENDS[i][0] for i in backends]
    with sdpa_kernel(chosen) if chosen else nullcontext():
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


def joined_linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Linear layers of one input: parts of one tensor."""
    return _parts(torch.cat(separate_linears(x, weights, biases), -1), weights)


def _parts(y: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return list(y.split_with_sizes([len(w) for w in weights], -1))


def linear_of_activation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    up: Tensor | None,
    left: Tensor | None,
) -> Tensor:
    """A linear layer of [left, act(x) * up]."""
    return F.linear(activated(x, activation, up, left), weight, bias)


# these four are in no forward that is recorded: a rewriting of its graph puts them there
LINEARS = library.define(
    "recorded_linears",
    "(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor[]",
    joined_linears,
    lambda x, weights, biases: _parts(
        x.new_empty(*x.shape[:-1], sum(len(w) for w in weights)), weights
    ),
)
LINEAR_GELU = library.define(
    "recorded_linear_gelu",
    "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    linear_gelu,
    lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
)
LINEAR_OF_ACTIVATION = library.define(
    "recorded_linear_of_activation",
    "(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? up, Tensor? left) -> Tensor",
    linear_of_activation,
    lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0]),
)
LINEAR_OF_PARTS = library.define(
    "recorded_linear_of_parts",
    "(Tensor[] parts, Tensor weight, Tensor? bias) -> Tensor",
    linear_of_parts,
    lambda parts, weight, bias: parts[0].new_empty(*parts[0].shape[:-1], weight.shape[0]),
)
ATTENTION = library.define(
    "recorded_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout, bool causal, "
    "float? scale, bool grouped, int[] backends) -> Tensor",
    plain_attention,
    lambda query, key, value, *_: query.new_empty(*query.shape[:-1], value.shape[-1]),
)
RMS_NORM = library.define(
    "recorded_rms_norm",
    "(Tensor x, int[] shape, Tensor? weight, float? eps) -> Tensor",
    plain_rms_norm,
    lambda x, shape, weight, eps: torch.empty_like(x, memory_format=torch.contiguous_format),
)


class _Layers(threading.local):
    """The opaque layers of the module that is recorded or run in this thread."""

    called: Sequence[nn.Module] = ()


_layers = _Layers()


@contextmanager
def opaque_layers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Make these the layers that calls in a graph mean, by their number."""
    before, _layers.called = _layers.called, layers
    try:
        yield
    finally:
        _layers.called = before


def call_layer(x: Tensor, number: int) -> Tensor:
    return _layers.called[number](x)


def _called(x: Tensor, number: int) -> Tensor:
    result = call_layer(x, number)
    # an op must not return its own input
    return result.clone() if result is x else result


def _width(layer: Any) -> int:
    # a weight that is packed in four bits has another shape
    return layer.out_features if isinstance(layer, nn.Linear) else layer.weight.shape[0]


LAYER = library.define(
    "recorded_layer",
    "(Tensor x, int number) -> Tensor",
    _called,
    lambda x, number: x.new_empty(*x.shape[:-1], _width(_layers.called[number])),
)
