"""Gradients of gated linear units and of GELU: da = dy b act'(a), db = dy act(a)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backward import Step, Values, empty_rows
from ..row.reference import widen
from .reference import halves

aten = torch.ops.aten


@dataclass(frozen=True)
class GluBackward:
    """The gradients of act(a) * b, or with an empty `b` of act(a); arguments as in `GluKernel`."""

    activation: str
    a: str = "input"
    b: str = "input"

    def reads(self, values: Values, wanted: Collection[str]) -> tuple[str, ...]:
        names = (self.a, self.b) if self.b and self.a in wanted else (self.a,)
        return tuple(dict.fromkeys(names))

    def reached(self, grads: Values, wanted: Collection[str]) -> list[str]:
        return list(wanted)

    def shared(self, values: Values) -> Mapping[str, str]:
        return {}

    def allocate(self, grads: Values, values: Values, wanted: Collection[str]) -> dict[str, Tensor]:
        return {n: empty_rows(values[n], values[self.a]) for n in wanted}

    def formula(self, grads: Values, values: Values, wanted: Collection[str]) -> dict[str, Tensor]:
        dy, function = widen(grads["out"]), self._function(values)
        b: Tensor | None = values[self.b] if self.b else None
        a: Tensor = values[self.a]
        if self.a == self.b:
            a, b = halves(a, values["gate"])
        a, b = widen(a), None if b is None else widen(b)
        found = {}
        if self.a in wanted:
            found[self.a] = _slope(dy if b is None else dy * b, a, function)
        if self.b in wanted:
            other = dy * _activated(a, function)
            if self.a == self.b:
                both = (found[self.a], other)
                other = torch.cat(both if values["gate"] == "first" else both[::-1], -1)
            found[self.b] = other
        return {n: g.to(values[self.a].dtype) for n, g in found.items()}

    def triton(self, grads: Values, values: Values, outs: dict[str, Tensor]) -> Iterator[Step]:
        from .backward_triton import plan

        dy = grads["out"]
        offsets = (0, 0)
        if self.a == self.b:
            half = dy.shape[-1]
            offsets = (0, half) if values["gate"] == "first" else (half, 0)
        yield Step(
            plan,
            {
                "dy": dy,
                "a": values[self.a],
                "b": values[self.b] if self.b else None,
                "da": outs.get(self.a),
                "db": outs.get(self.b),
                "offsets": offsets,
                "function": self._function(values),
            },
        )

    def _function(self, values: Values) -> str:
        if self.activation != "gelu":
            return self.activation
        return "gelu_tanh" if values["approximate"] else "gelu_erf"


def _activated(a: Tensor, function: str) -> Tensor:
    if function == "silu":
        return aten.silu(a)
    return aten.gelu(a, approximate="tanh" if function == "gelu_tanh" else "none")


def _slope(grad: Tensor, a: Tensor, function: str) -> Tensor:
    """grad * act'(a)"""
    if function == "silu":  # PyTorch's own silu_backward has no gradient
        s = torch.sigmoid(a)
        return grad * (s * (1 + a * (1 - s)))
    form = "tanh" if function == "gelu_tanh" else "none"
    return aten.gelu_backward(grad, a, approximate=form)
