"""Gradients of the row kernel's ops, in one formula and one kernel for all of them.

    s = residual + gate * x              n = norm(s)
    a = n * weight + bias                m = a * (1 + scale) + shift           y = m * out_gate

    dm = dy * out_gate                   d out_gate = dy * m
    da = dm * (1 + scale)                d scale = dm * a,  d shift = dm
    dn = da * weight                     d weight = da * n,  d bias = da
    ds = dsum + rstd * (dn - mean(dn) - n * mean(dn * n)), without mean(dn) if the norm is rms
    d residual = ds,  dx = gate * ds,  d gate = x * ds

Gradients of weights and modulations are sums over the rows that share them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backward import Step, Values, empty_rows
from . import RowKernel
from .call import SHARED
from .reference import affine, centred, modulated, spread, summed, widen


@dataclass(frozen=True)
class RowBackward:
    """The gradients of an op whose arguments are these parts of the row kernel."""

    parts: RowKernel

    def reads(self, values: Values, wanted: Collection[str]) -> tuple[str, ...]:
        at, there = self._at(), self._there(values)
        asked = {p for p in at if at[p] in wanted}
        kept = set()
        if self.parts.y:
            kept |= {"weight", "scale", "out_gate"}
            above = asked & {"scale", "out_gate"}
            if self.parts.norm != "none" or above:
                kept.add("sum" if "residual" in there else "x")
            if above:
                kept |= {"bias", "shift"} if "out_gate" in asked else {"bias"}
        if "residual" in there:
            kept.add("gate")
            if "gate" in asked and "gate" in there:
                kept.add("x")
        # a sum over rows has the shape of what it is the gradient of
        kept |= asked & set(SHARED)
        return tuple(at[p] for p in at if p in kept & (there | {"sum"}))

    def reached(self, grads: Values, wanted: Collection[str]) -> list[str]:
        if not self.parts.y or grads[self.parts.y] is not None:
            return list(wanted)
        # the sum depends on residual, x and gate alone
        at = self._at()
        return [n for n in wanted if n in (at["residual"], at["x"], at["gate"])]

    def shared(self, values: Values) -> Mapping[str, str]:
        at = self._at()
        if at["residual"] and values.get(at["gate"]) is None:
            return {at["residual"]: at["x"]}
        return {}

    def allocate(self, grads: Values, values: Values, wanted: Collection[str]) -> dict[str, Tensor]:
        at = self._at()
        rows = {at["x"], at["residual"]}
        return {
            name: empty_rows(*self._rows(grads, values))
            if name in rows
            else torch.empty_like(values[name], memory_format=torch.contiguous_format)
            for name in wanted
        }

    def formula(self, grads: Values, values: Values, wanted: Collection[str]) -> dict[str, Tensor]:
        at, named = self._at(), self._bound(values)
        dy = None if not self.parts.y else grads[self.parts.y]
        dsum = None if not self.parts.sum else grads[self.parts.sum]
        norm, eps = self._norm(values)
        found = _formula(dy, dsum, named, norm, eps, {p for p in at if at[p] in wanted})
        return {at[p]: g for p, g in found.items()}

    def triton(self, grads: Values, values: Values, outs: dict[str, Tensor]) -> Iterator[Step]:
        from .backward_triton import steps

        at = self._at()
        dy = None if not self.parts.y else grads[self.parts.y]
        dsum = None if not self.parts.sum else grads[self.parts.sum]
        norm, eps = self._norm(values)
        wanted = {p: outs[at[p]] for p in at if at[p] in outs}
        return steps(dy, dsum, self._bound(values), norm, eps, wanted)

    def _at(self) -> dict[str, str]:
        """The op's name of each part; "" where it has none."""
        names = ("x", "residual", *SHARED, "sum")
        return {p: getattr(self.parts, p) for p in names}

    def _there(self, values: Values) -> set[str]:
        at = self._at()
        return {p for p in at if at[p] and values.get(at[p]) is not None}

    def _bound(self, values: Values) -> dict[str, Tensor | None]:
        """The kept tensors by their part; "s" is the row that is normalised."""
        at = self._at()
        named = {p: values.get(at[p]) if at[p] else None for p in at}
        named["s"] = named.pop("sum") if at["residual"] else named["x"]
        return named

    def _rows(self, grads: Values, values: Values) -> list[Any]:
        """Tensors of the shape and dtype of x, those kept first."""
        at = self._at()
        kept = [values.get(at[p]) for p in ("sum", "x", "residual") if at[p]]
        return [*kept, *grads.values()]

    def _norm(self, values: Values) -> tuple[str, float]:
        return values.get(self.parts.norm, self.parts.norm), float(values.get("eps", 0.0))


def _formula(
    dy: Tensor | None,
    dsum: Tensor | None,
    parts: Mapping[str, Tensor | None],
    norm: str,
    eps: float,
    wanted: Collection[str],
) -> dict[str, Tensor]:
    """The gradients of the parts in `wanted`, by the formula above."""
    found: dict[str, Tensor] = {}
    given = dy if dy is not None else dsum
    assert given is not None
    dtype = given.dtype

    def give(part: str, grad: Any) -> None:
        like = parts[part]
        if part in wanted and like is not None:
            found[part] = summed(grad() if callable(grad) else grad, like)

    ds = None if dsum is None else widen(dsum)
    if dy is not None:
        dy = widen(dy)
        weight, scale, shift, out_gate = (
            None if t is None else spread(widen(t), dy)
            for t in (parts[p] for p in ("weight", "scale", "shift", "out_gate"))
        )
        # what is left out of `reads` is not needed
        n, rstd = dy, None
        if parts["s"] is not None:
            n, rstd = _normalized(widen(parts["s"]), norm, eps)

        def a() -> Tensor:
            return affine(n, weight, parts["bias"])

        dm = dy if out_gate is None else dy * out_gate
        give("out_gate", lambda: dy * modulated(a(), scale, shift))
        give("shift", dm)
        give("scale", lambda: dm * a())
        da = dm if scale is None else dm * (1 + scale)
        give("bias", da)
        give("weight", lambda: da * n)
        dn = da if weight is None else da * weight
        if rstd is not None:
            centred = dn - dn.mean(-1, keepdim=True) if norm == "layer" else dn
            dn = (centred - n * (dn * n).mean(-1, keepdim=True)) * rstd
        ds = dn if ds is None else ds + dn
    assert ds is not None
    gate = parts["gate"]
    x = parts["x"]
    if x is not None:
        give("gate", lambda: ds * widen(x))
    if "residual" in wanted:
        found["residual"] = ds.to(dtype)
    if "x" in wanted:
        found["x"] = (ds if gate is None else ds * spread(widen(gate), ds)).to(dtype)
    return found


def _normalized(s: Tensor, norm: str, eps: float) -> tuple[Tensor, Tensor | None]:
    """norm(s) and 1 / sqrt(mean(s²) + eps), None without a norm."""
    if norm == "none":
        return s, None
    s = centred(s) if norm == "layer" else s
    rstd = 1 / torch.sqrt(s.square().mean(-1, keepdim=True) + eps)
    return s * rstd, rstd
