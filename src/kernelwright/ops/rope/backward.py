"""Gradients of the rotary kernel's ops: the rotation turned back, then that of RMSNorm.

    z = norm(x) * weight                 y = z cos + turned(z) sin,  turned(a, b) = (-b, a)

    dz = dy cos - turned(dy sin)         d cos = dy z,  d sin = dy turned(z)
    dn = dz * weight                     d weight = dz * n, summed over rows
    dx = rstd * (dn - n * mean(dn * n))

The gradients of cos and sin, which models do not train, are the formula's on every backend.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backward import Step, Values, empty_rows
from ..row.reference import widen
from .kernel import RopeKernel
from .reference import full_width, turned, turned_rows
from .tables import over_rows

# query or key: its part, its weight, its output
SIDES = (("query", "q_weight", "q_out"), ("key", "k_weight", "k_out"))


@dataclass(frozen=True)
class RopeBackward:
    """The gradients of an op whose arguments are these parts of the rotary kernel."""

    parts: RopeKernel

    def reads(self, values: Values, wanted: Collection[str]) -> tuple[str, ...]:
        tables = [n for n in (self.parts.cos, self.parts.sin) if n]
        turning = any(n in wanted for n in tables)
        kept = list(tables)
        for x, weight, _ in self._sides():
            if turning or (self.parts.norm and (x in wanted or weight in wanted)):
                kept += [x, weight]
        return tuple(n for n in kept if n and values.get(n) is not None)

    def reached(self, grads: Values, wanted: Collection[str]) -> list[str]:
        lost = {n for x, weight, out in self._sides() if grads[out] is None for n in (x, weight)}
        return [n for n in wanted if n not in lost]

    def shared(self, values: Values) -> Mapping[str, str]:
        return {}

    def allocate(self, grads: Values, values: Values, wanted: Collection[str]) -> dict[str, Tensor]:
        rows = {x: grads[out] for x, _, out in self._sides()}
        return {n: empty_rows(values[n], rows.get(n)) for n in wanted}

    def formula(self, grads: Values, values: Values, wanted: Collection[str]) -> dict[str, Tensor]:
        cos, sin = (values.get(n) if n else None for n in (self.parts.cos, self.parts.sin))
        found: dict[str, Tensor] = {}
        d_tables: list[tuple[Tensor, Tensor]] = []
        for x_name, weight_name, out in self._sides():
            if grads[out] is None:
                continue
            dz = dy = widen(grads[out])
            x, weight = values.get(x_name), values.get(weight_name) if weight_name else None
            if cos is not None and sin is not None:
                flat = self._turned_rows(dy, cos, values)
                c, s = (
                    full_width(over_rows(t, flat), flat.shape[-1], values["layout"])
                    for t in (cos, sin)
                )
                dz = (flat * c - turned(flat * s, values["layout"])).reshape(dy.shape)
            n, rstd = None, None
            if self.parts.norm and x is not None:
                row = self._normed_rows(widen(x), values)
                rstd = 1 / torch.sqrt(row.square().mean(-1, keepdim=True) + values["eps"])
                n = row * rstd
            if cos is not None and {self.parts.cos, self.parts.sin} & set(wanted):
                assert x is not None
                z = (
                    widen(x)
                    if n is None
                    else (n if weight is None else n * weight).reshape(dy.shape)
                )
                z = self._turned_rows(z, cos, values)
                flat = self._turned_rows(dy, cos, values)
                d_tables.append((flat * z, flat * turned(z, values["layout"])))
            if n is not None and rstd is not None:
                d_row = self._normed_rows(dz, values)
                if weight_name in wanted and weight is not None:
                    found[weight_name] = (d_row * n).sum_to_size(weight.shape).to(weight.dtype)
                dn = d_row if weight is None else d_row * weight
                dz = ((dn - n * (dn * n).mean(-1, keepdim=True)) * rstd).reshape(dy.shape)
            if x_name in wanted:
                found[x_name] = dz.to(grads[out].dtype)
        for i, name in enumerate((self.parts.cos, self.parts.sin)):
            if name in wanted:
                sides = [_as_table(d[i], values[name], values["layout"]) for d in d_tables]
                found[name] = torch.stack(sides).sum(0).to(values[name].dtype)
        return found

    def triton(self, grads: Values, values: Values, outs: dict[str, Tensor]) -> Iterator[Step]:
        from .backward_triton import steps

        tables = {n for n in (self.parts.cos, self.parts.sin) if n in outs}
        if set(outs) - tables:
            yield from steps(self.parts, self._sides(), grads, values, outs)
        if tables:
            for name, grad in self.formula(grads, values, tables).items():
                outs[name].copy_(grad)

    def _sides(self) -> list[tuple[str, str, str]]:
        named = [tuple(getattr(self.parts, p) for p in side) for side in SIDES]
        return [(x, weight, out) for x, weight, out in named if x]

    def _normed_rows(self, x: Tensor, values: Values) -> Tensor:
        if not values.get("across_heads"):
            return x
        # not flatten, which has no rule for batched gradients
        return x.reshape(*x.shape[:2], math.prod(x.shape[2:]))

    def _turned_rows(self, x: Tensor, cos: Tensor, values: Values) -> Tensor:
        return turned_rows(x, cos, bool(values.get("across_heads")))


def _as_table(grad: Tensor, table: Tensor, layout: str) -> Tensor:
    """A gradient for each element of the rows, summed to the shape of the table."""
    shape = over_rows(table, grad).shape
    if shape[-1] != grad.shape[-1]:  # pairs of a half-width table share a column
        interleaved = layout == "interleaved"
        a, b = (grad[..., ::2], grad[..., 1::2]) if interleaved else grad.chunk(2, -1)
        grad = a + b
    return grad.sum_to_size(shape).reshape(table.shape)
