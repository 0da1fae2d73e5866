"""Programs that store a result in fp8 as well, for the fp8 GEMMs that read it.

Such a GEMM multiplies rows of eight bits, each with a scale by which its largest element is the
largest fp8 value. The program has a whole row in registers; a pass of its own would read it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx

from ..backends import Unsupported
from ..ops.fp8.reference import DTYPE
from .expression import Load
from .lowering import Shape
from .program import Program, Store
from .recorded_ops import LINEAR, LINEARS

# in the `meta` of a node that GEMMs read in fp8
READ_IN_EIGHT_BITS = "read in eight bits"


def mark_rows(graph: fx.Graph, wanted: Callable[[fx.Node], bool]) -> None:
    """Say of the inputs of linear layers that are `wanted` that they are read in eight bits."""
    for op in (LINEAR, LINEARS):
        for node in graph.find_nodes(op="call_function", target=op):
            if wanted(node):
                node.args[0].meta[READ_IN_EIGHT_BITS] = True


@dataclass(frozen=True)
class EightBitRows:
    """The names, shapes and dtypes of what is stored beside a tensor."""

    source: str
    rows: str
    scale: str
    shape: tuple[int, ...]

    @staticmethod
    def of(store: Store) -> EightBitRows:
        target = store.target
        return EightBitRows(target, f"{target}_rows", f"{target}_scale", store.shape)

    def parts(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        yield self.rows, self.shape, DTYPE
        yield self.scale, (*self.shape[:-1], 1), torch.float32


def eight_bit_rows(program: Program) -> list[EightBitRows]:
    """What a program stores in eight bits."""
    return [EightBitRows.of(s) for s in program.stores if s.eight]


def with_eight_bit_rows(
    steps: list[fx.Node | Program], graph: fx.Graph, is_good: Callable[[Program], bool]
) -> list[fx.Node | Program]:
    """The steps of a plan. A program also stores in eight bits what fp8 GEMMs read, unless the
    changed program is not `is_good`."""
    wanted = {n.name for n in graph.nodes if n.meta.get(READ_IN_EIGHT_BITS)}
    if not wanted:
        return steps
    stored = [s.target for step in steps if isinstance(step, Program) for s in step.stores]
    whole = {name for name in wanted if stored.count(name) == 1}

    def changed(program: Program) -> Program:
        stores = tuple(
            replace(s, eight=s.target in whole and _is_row(program, s)) for s in program.stores
        )
        made = replace(program, stores=stores)
        return made if made != program and is_good(made) else program

    return [changed(step) if isinstance(step, Program) else step for step in steps]


def _is_row(program: Program, store: Store) -> bool:
    """Whether the threads that share a row hold exactly one row of a contiguous tensor. A copy into
    another layout is excluded: its kernel works on tiles, not on rows."""
    if isinstance(store.value, Load):
        return False
    try:
        shape = Shape.of(program)
    except Unsupported:
        return False
    extents = dict(program.extents)
    along, step = {}, 1
    for name in reversed(shape.along):
        along[name] = step
        step *= extents[name]
    if step != store.shape[-1] or store.strides != contiguous_strides(store.shape):
        return False
    *rows, last = store.index
    if last.constant or dict(last.terms) != along:
        return False
    known = {name for part in rows for name in part.names}
    return known <= set(shape.rows) and not any(part.constant for part in rows)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
