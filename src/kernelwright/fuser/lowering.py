"""A program as a kernel sees it: rows, the elements along a row, and what is loaded from where.

Variables along a row (`along`) are spread over threads and vector lanes; those that count rows are
known to a whole row. A norm is taken apart into its statistics, which are one value a row, and what
it does to each element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import torch

from ..backends import Unsupported
from .expression import Choice, Expression, Load, Row, Step
from .index import Affine, Space
from .norms import MEAN, SCALE, STATISTICS
from .program import Program

aten: Any = torch.ops.aten
# without a sum along it a row is the last dimension, and what comes before it while it is shorter
SHORT = 32


@dataclass(frozen=True)
class Statistics:
    """Of a row, in the order of summation of an ATen op: the state of a norm, or a sum, of which
    each term may have a factor that is the same in the whole row."""

    op: Any
    x: Any
    over: tuple[str, ...]
    args: tuple[Any, ...]
    dtype: torch.dtype
    factor: Any = None


@dataclass(frozen=True)
class Normed:
    """One element, normalised with the statistics of its row."""

    of: Statistics
    x: Any
    scales: tuple[Any, ...]
    dtype: torch.dtype


Lowered = Load | Step | Choice | Statistics | Normed


def operands(e: Any) -> list[Any]:
    if isinstance(e, Statistics):
        return [e.x] if e.factor is None else [e.x, e.factor]
    if isinstance(e, Normed):
        return [e.of, e.x, *(s for s in e.scales if s is not None)]
    if isinstance(e, Step):
        return [a for a in e.args if isinstance(a, Lowered)]
    return list(e.pieces) if isinstance(e, Choice) else []


def inside(values: Iterable[Lowered]) -> list[Any]:
    """Everything that values are made of, each once, operands first."""
    found: dict[Any, None] = {}

    def look(e: Any) -> None:
        if e not in found:
            for i in operands(e):
                look(i)
            found[e] = None

    for value in values:
        look(value)
    return list(found)


def statistics_of(values: Iterable[Lowered]) -> list[Statistics]:
    """The sums along the row that values are made of, operands first."""
    return [e for e in inside(values) if isinstance(e, Statistics)]


# the parts of a complex product, of the four parts of its factors
PRODUCT = ("real part of a product", "imaginary part of a product")
# of three factors, the first two multiplied and the third added, rounded once
MULTIPLY_ADD = "multiply and add"
# what a norm finds of a row
OF_A_NORM = {MEAN: "mean of a norm", SCALE: "scale of a norm"}
PARTS_OF_COMPLEX = {aten.real: 0, aten.imag: 1}


COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def part_of(e: Any, part: int) -> Any:
    """The real or the imaginary part of a complex expression."""
    dtype = COMPLEX.get(e.dtype)
    if dtype is None:
        raise Unsupported(f"complex numbers of {e.dtype}")
    if isinstance(e, Load):
        # a kernel sees a complex tensor as one of pairs
        return Load(e.source, (*e.index, Affine(part)), dtype)
    if isinstance(e, Choice):
        return Choice(e.name, tuple(part_of(p, part) for p in e.pieces), dtype)
    if isinstance(e, Step):
        packet = getattr(e.op, "overloadpacket", e.op)
        if packet is aten.complex:
            return e.args[part]
        if packet is aten._to_copy:
            return _as(part_of(e.args[0], part), dtype)
        if packet is aten.mul and all(_is_complex(a) for a in e.args):
            parts = tuple(_as(part_of(a, i), dtype) for a in e.args for i in (0, 1))
            return Step(PRODUCT[part], parts, (), dtype)
    raise Unsupported("complex numbers")


def _as(e: Any, dtype: torch.dtype) -> Any:
    return e if e.dtype == dtype else Step(aten._to_copy.default, (e,), (), dtype)


def _is_complex(e: Any) -> bool:
    return _is_expression(e) and e.dtype in COMPLEX


def lowered(e: Expression, space: Space) -> Lowered:
    """The same expression with rows and complex numbers taken apart."""

    @cache
    def low(e: Any) -> Any:
        if isinstance(e, Step):
            whole = PARTS_OF_COMPLEX.get(getattr(e.op, "overloadpacket", e.op))
            if whole is not None and _is_complex(e.args[0]):
                return low(part_of(e.args[0], whole))
            return replace(e, args=tuple(low(a) if _is_expression(a) else a for a in e.args))
        if isinstance(e, Choice):
            return chosen_inside(e.name, tuple(map(low, e.pieces)))
        if isinstance(e, Row):
            if e.at is None and not e.part:
                return Statistics(e.op, low(e.x), e.over, e.args, e.dtype)
            of = Statistics(e.op, low(e.x), e.over, e.args, e.x.dtype)
            if e.at is None:
                name = STATISTICS[e.op.overloadpacket][e.part - 1]
                return Step(OF_A_NORM[name], (of,), (), e.dtype)
            sizes = [space.extents[n] for n in e.over]
            places = dict(zip(e.over, space.unravelled(e.at, sizes), strict=True))
            if e.others:
                return norm_gradient(e, prod(sizes), low, lambda x: low(moved(x, places)))
            scales = tuple(None if s is None else low(moved(s, places)) for s in e.scales)
            return Normed(of, low(moved(e.x, places)), scales, e.dtype)
        return e

    return low(e)


def norm_gradient(
    e: Row, width: int, along: Callable[[Any], Any], here: Callable[[Any], Any]
) -> Any:
    """The gradient of a norm's input in the arithmetic of ATen's kernel, as nvcc contracts it:
    `along` is an operand anywhere along the row, `here` at the element that is meant."""
    x, *mean, scale = e.others
    wide = partial(Step, kwargs=(), dtype=torch.float32)

    def terms(at: Callable[[Any], Any]) -> tuple[Any, Any]:
        centred = wide(aten.sub.Tensor, (at(x), at(mean[0]))) if mean else at(x)
        (weight,) = e.scales
        if weight is None:
            return _as(at(e.x), torch.float32), centred
        return wide(aten.mul.Tensor, (at(e.x), at(weight))), centred

    def total(term: Any, factor: Any = None) -> Statistics:
        return Statistics(e.op, term, e.over, (), torch.float32, factor)

    weighted, centred = terms(along)
    products = total(wide(aten.mul.Tensor, (weighted, centred)), along(scale))
    _, centred = terms(here)
    of_mean = wide(aten.mul.Tensor, (wide(aten.mul.Tensor, (centred, here(scale))), products))
    times: Any = float(width)
    if e.scales[0] is not None:
        times = wide(aten.mul.Tensor, (here(e.scales[0]), times))
    found = wide(MULTIPLY_ADD, (here(e.x), times, wide(aten.neg.default, (of_mean,))))
    if mean:
        found = wide(aten.sub.Tensor, (found, total(weighted)))
    each = wide(aten.mul.Tensor, (here(scale), 1 / width))
    return _as(wide(aten.mul.Tensor, (found, each)), e.dtype)


def chosen_inside(name: str, pieces: tuple[Any, ...]) -> Any:
    """The one of `pieces` that the variable `name` tells, computed once: pieces made in the same
    way choose between what they are made of, and loads that only begin elsewhere are one."""
    first, *others = pieces
    if all(p == first for p in others):
        return first
    alike = all(type(p) is type(first) and p.dtype == first.dtype for p in others)
    if alike and isinstance(first, Load):
        load = _one_load(name, pieces)
        return load if load is not None else Choice(name, pieces, first.dtype)
    if alike and isinstance(first, Step):
        ops = {(p.op, p.kwargs, len(p.args)) for p in pieces}
        args = list(zip(*(p.args for p in pieces), strict=True)) if len(ops) == 1 else []
        if args and all(map(_can_be_one, args)):
            made = tuple(chosen_inside(name, a) if _is_lowered(a[0]) else a[0] for a in args)
            return replace(first, args=made)
    if alike and isinstance(first, Normed) and all(p.of == first.of for p in others):
        scales = list(zip(*(p.scales for p in pieces), strict=True))
        if all(map(_can_be_one, scales)):
            made = tuple(None if s[0] is None else chosen_inside(name, s) for s in scales)
            return replace(first, x=chosen_inside(name, tuple(p.x for p in pieces)), scales=made)
    return _up_to_signs(name, pieces)


def _up_to_signs(name: str, pieces: tuple[Any, ...]) -> Any:
    """A choice between pieces some of which are negative: of one value and its negative."""
    kept = Choice(name, pieces, pieces[0].dtype)
    negative = [isinstance(p, Step) and p.op is aten.neg.default for p in pieces]
    if all(negative) or not any(negative):
        return kept
    inner = tuple(p.args[0] if n else p for p, n in zip(pieces, negative, strict=True))
    if len({p.dtype for p in (*inner, *pieces)}) > 1:
        return kept
    one = chosen_inside(name, inner)
    if isinstance(one, Choice):
        return kept
    signed = (Step(aten.neg.default, (one,), (), one.dtype) if n else one for n in negative)
    return Choice(name, tuple(signed), one.dtype)


def _one_load(name: str, pieces: tuple[Any, ...]) -> Load | None:
    """A load at a place that the variable decides, if the places of `pieces` follow each other
    evenly."""
    first, second = pieces[0], pieces[1]
    index = []
    for d, begin in enumerate(first.index):
        step = second.index[d].constant - begin.constant
        for i, piece in enumerate(pieces):
            at = piece.index[d]
            if at.terms != begin.terms or at.constant != begin.constant + i * step:
                return None
        index.append(begin + Affine(0, ((name, step),)) if step else begin)
    if any(p.source != first.source for p in pieces):
        return None
    return replace(first, index=tuple(index))


def _can_be_one(operands: tuple[Any, ...]) -> bool:
    """Whether operands of several pieces are all expressions, of one dtype, or all the same."""
    if all(map(_is_lowered, operands)):
        return len({o.dtype for o in operands}) == 1
    return all(type(o) is type(operands[0]) and o == operands[0] for o in operands)


def _is_lowered(value: Any) -> bool:
    return isinstance(value, Lowered)


def moved(e: Any, places: Mapping[str, Affine]) -> Any:
    """An expression at other values of some variables."""
    if all(places.get(n, v) == v for n, v in ((n, Affine(0, ((n, 1),))) for n in places)):
        return e

    @cache
    def move(e: Any) -> Any:
        if isinstance(e, Load):
            return replace(e, index=tuple(moved_index(i, places) for i in e.index))
        if isinstance(e, Step):
            return replace(e, args=tuple(move(a) if _is_expression(a) else a for a in e.args))
        if isinstance(e, Choice):
            if e.name not in places:
                return replace(e, pieces=tuple(map(move, e.pieces)))
            at = places[e.name]
            if at.terms:
                raise Unsupported("a choice by a variable that moves")
            return move(e.pieces[at.constant])
        if set(e.over) & set(places):
            raise Unsupported("a row inside a row")
        return e

    return move(e)


def moved_index(index: Affine, places: Mapping[str, Affine]) -> Affine:
    total = Affine(index.constant)
    for name, coefficient in index.terms:
        total = total + places.get(name, Affine(0, ((name, 1),))) * coefficient
    return total


def _is_expression(value: Any) -> bool:
    return isinstance(value, Load | Step | Choice | Row)


@dataclass(frozen=True)
class Shape:
    """Which variables count rows, and which lie along them."""

    rows: tuple[str, ...]
    along: tuple[str, ...]

    @staticmethod
    def of(program: Program) -> Shape:
        names = [n for n, _ in program.extents]
        found = {r.over for r in program.rows}
        if len(found) > 1:
            raise Unsupported("rows along different dimensions in one program")
        if found:
            (along,) = found
            return Shape(tuple(n for n in names if n not in along), along)
        extents, first = dict(program.extents), max(len(names) - 1, 0)
        while first > 0 and prod(extents[n] for n in names[first:]) < SHORT:
            first -= 1
        # the parts of a dimension that was split stay together
        while first > 0 and names[first][:2] == names[first - 1][:2]:
            first -= 1
        return Shape(tuple(names[:first]), tuple(names[first:]))
