"""A linear layer in fp8 as one op for torch.compile.

The op is given the layer's 16-bit weight, wherever that lies, and finds the layer by it when it
runs: so all blocks of a model share one trace. What runs is what runs without torch.compile: the
weight is quantised and compared at first sight, and a layer that was refused stays in 16 bits.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops import library
from ...ops.fp8.reference import ACTIVATIONS
from ..runtime import model_run

WHOLE = "the whole model is compiled; compile its blocks instead"
_ids = count(1)
_injections: WeakValueDictionary[int, Any] = WeakValueDictionary()


def number(eight: Any) -> int:
    """A number for the fp8 layers of an injection: a constant in compiled graphs."""
    found = next(_ids)
    _injections[found] = eight
    return found


class LayersByWeight:
    """Finds layers by the address of their weights, which may change."""

    def __init__(self) -> None:
        self._known: dict[int, ref[nn.Module]] = {}

    def find(self, weight: Tensor, layers: Any) -> Any:
        address = weight.data_ptr()
        held = self._known.get(address)
        layer: Any = None if held is None else held()
        if layer is None or layer.weight.data_ptr() != address:
            self._known = {m.weight.data_ptr(): ref(m) for m in layers}
            held = self._known.get(address)
            layer = None if held is None else held()
        return layer


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    up: Tensor | None,
    left: Tensor | None,
    injection: int,
) -> Tensor:
    eight = _injections.get(injection)
    layer = None if eight is None else eight.layer_of(weight)
    with torch.no_grad():
        if eight is None or layer is None:
            return F.linear(_given(x, activation, up, left), weight.to(x.device), bias)
        if not model_run.active.token:
            # nobody compares samples of the weights then, so a merged adapter would go unnoticed
            eight.checker.misfits[layer] = WHOLE
            y = None
        else:
            y = eight.run(layer, x, activation, up, left, rest=False)
        return eight.in_16_bits(layer, _given(x, activation, up, left)) if y is None else y


def _given(x: Tensor, activation: str, up: Tensor | None, left: Tensor | None) -> Tensor:
    """The input of the layer."""
    x = ACTIVATIONS[activation](x)
    x = x if up is None else x * up
    return x if left is None else torch.cat([left, x], -1)


FP8_LINEAR = library.define_unrecorded(
    "fp8_linear",
    "(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? up, Tensor? left, "
    "int injection) -> Tensor",
    _run,
    lambda x, weight, bias, activation, up, left, injection: x.new_empty(
        (*x.shape[:-1], weight.shape[0])
    ),
)
