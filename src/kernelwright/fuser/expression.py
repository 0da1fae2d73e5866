"""What an element of a program's result is made of: loads, steps, choices between parts, rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch

from .index import Affine

T = TypeVar("T")


def hashed_once(kind: type[T]) -> type[T]:
    """An expression is looked up often, and its hash is that of everything it is made of."""
    whole = kind.__hash__

    def kept(self: Any) -> int:
        found = vars(self).get("_hash")
        if found is None:
            found = vars(self)["_hash"] = whole(self)
        return found

    kind.__hash__ = kept  # type: ignore[method-assign]
    return kind


@hashed_once
@dataclass(frozen=True)
class Load:
    """An element of a tensor in memory; `index` has one entry for each dimension."""

    source: str
    index: tuple[Affine, ...]
    dtype: torch.dtype


@hashed_once
@dataclass(frozen=True)
class Step:
    """An ATen op on single elements, its result rounded to `dtype`. Arguments are expressions,
    numbers or None."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    dtype: torch.dtype


@hashed_once
@dataclass(frozen=True)
class Choice:
    """One of several expressions, by the value of a variable, on which none of them depends."""

    name: str
    pieces: tuple[Expression, ...]
    dtype: torch.dtype


@hashed_once
@dataclass(frozen=True)
class Row:
    """What an ATen op makes of all elements of a row, in that op's own order of summation.

    `over` are the variables along the row, `x` its element there. A reduction (mean, sum) gives one
    value a row. A norm gives one for each element, with `scales` the elements of its weight and
    bias; the one that is meant is that at position `at`. A norm's statistics are one value a row
    again: its results of these numbers (`part`). `others` are what the gradient of a norm reads of
    the row besides.
    """

    op: Any
    x: Expression
    over: tuple[str, ...]
    args: tuple[Any, ...]
    scales: tuple[Expression | None, ...]
    at: Affine | None
    dtype: torch.dtype
    part: int = 0
    others: tuple[Expression, ...] = ()

    @property
    def reduces(self) -> bool:
        return self.at is None


Expression = Load | Step | Choice | Row


def inside(e: Any) -> Iterator[Expression]:
    """The expressions that one is made of, without itself."""
    if isinstance(e, Step):
        yield from (a for a in e.args if isinstance(a, Expression))
    elif isinstance(e, Choice):
        yield from e.pieces
    elif isinstance(e, Row):
        yield e.x
        yield from e.others
        yield from (s for s in e.scales if s is not None)


def rewritten(change: Callable[[Load], Expression]) -> Callable[[Any], Any]:
    """What makes an expression anew, with its loads changed."""

    @cache
    def new(e: Any) -> Any:
        if isinstance(e, Load):
            return change(e)
        if isinstance(e, Step):
            args = tuple(new(a) if isinstance(a, Expression) else a for a in e.args)
            return replace(e, args=args)
        if isinstance(e, Choice):
            return replace(e, pieces=tuple(map(new, e.pieces)))
        scales = tuple(None if s is None else new(s) for s in e.scales)
        return replace(e, x=new(e.x), scales=scales, others=tuple(map(new, e.others)))

    return new


ROUNDED = "rounded"  # in the `meta` of a node: see `rounded`


def rounded(x: Any) -> Any:
    """A step that rounds a value to its dtype in kernels that otherwise round only what they store:
    another plan of the same block stores this value, and reads it back rounded. PyTorch's results
    are rounded already, so the interpreter has nothing to do."""
    return x


def walk(*roots: Expression) -> Iterator[Expression]:
    """Each expression once, operands before what is made of them."""
    seen: set[int] = set()
    stack: list[tuple[Expression, bool]] = [(e, False) for e in reversed(roots)]
    known: set[Expression] = set()
    while stack:
        e, ready = stack.pop()
        if ready:
            if e not in known:
                known.add(e)
                yield e
            continue
        if id(e) in seen:
            continue
        seen.add(id(e))
        stack.append((e, True))
        stack += [(i, False) for i in inside(e)]
