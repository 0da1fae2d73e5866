"""Tensors that lie across the rows of a program: copied into rows, and back.

A convolution leaves its channels apart: a token's elements are then as far from each other as there
are tokens, and eager's additions keep that layout through all blocks. A program whose threads walk
along such a row would touch a sector of memory for each element. So it reads a copy that lies in
rows, and what it writes is copied back, each by one kernel that moves tiles. Nothing is copied back
that only programs read, and nothing is copied for a program that can be run by tiles.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from ..backends import Unsupported
from .cuda_kernel import Tensor
from .cuda_tiles import directions
from .expression import Load, rewritten, walk
from .index import Affine, position
from .lowering import Shape
from .program import Program, Store

# rows and elements along them from which on a copy is worth its launch; one warp of each, not tuned
LONG = 32
# the name of the copy of a tensor that lies in rows
IN_ROWS = "_in_rows"


def in_rows(
    steps: list[fx.Node | Program], values: Mapping[str, Any], kept: Collection[str]
) -> list[fx.Node | Program]:
    """The steps of a plan, with copies of tensors that lie across rows. `values` has each node's
    result as recorded; those in `kept` are read by others than programs."""
    return _Layouts(values, kept).changed(steps)


class _Layouts:
    def __init__(self, values: Mapping[str, Any], kept: Collection[str]) -> None:
        self.values, self.kept = values, kept
        # strides of the copies of tensors that also, or only, lie in rows
        self.copied: dict[str, tuple[int, ...]] = {}

    def changed(self, steps: list[fx.Node | Program]) -> list[fx.Node | Program]:
        found: list[fx.Node | Program] = []
        parts: dict[str, int] = {}  # how many programs write a part of a tensor
        for step in steps:
            for s in step.stores if isinstance(step, Program) else ():
                parts[s.target] = parts.get(s.target, 0) + 1
        for step in steps:
            if isinstance(step, fx.Node):
                found.append(step)
                continue
            step = _turned(step, self.values)
            across = _across(step, self.values)
            tiled = self._is_tiled(step, across)
            for name in step.loads:
                if name in across and name not in self.copied and not tiled:
                    self.copied[name] = across[name]
                    found.append(self._copy(name, name + IN_ROWS, across[name]))
            stored = [s.target for s in step.stores if s.target in across and parts[s.target] == 1]
            self.copied |= {name: across[name] for name in stored}
            found.append(self._renamed(step))
            for name in stored:
                if name in self.kept:
                    strides = self.values[name].stride()
                    found.append(self._copy(name + IN_ROWS, name, strides))
        return found

    def _is_tiled(self, program: Program, across: Collection[str]) -> bool:
        """Whether a kernel reads by tiles what lies across, so that it needs no copy."""
        if any(s.target in across for s in program.stores):
            return False  # copied back, if at all: who reads it wants rows
        tensors = {n: Tensor(self.values[n].stride(), self.values[n].dtype) for n in program.loads}
        tensors |= {s.target: Tensor(s.strides, s.dtype) for s in program.stores}
        return directions(program, tensors) is not None

    def _renamed(self, program: Program) -> Program:
        """A program that reads and writes the copies."""

        def copy(load: Load) -> Load:
            copied = load.source in self.copied
            return replace(load, source=load.source + IN_ROWS) if copied else load

        moved = rewritten(copy)
        stores = []
        for s in program.stores:
            s = replace(s, value=moved(s.value))
            if s.target in self.copied:
                s = replace(s, target=s.target + IN_ROWS, strides=self.copied[s.target])
            stores.append(s)
        return replace(program, stores=tuple(stores))

    def _copy(self, source: str, target: str, strides: tuple[int, ...]) -> Program:
        like = self.values[source.removesuffix(IN_ROWS)]
        extents = tuple((f"d{i}", n) for i, n in enumerate(like.shape) if n > 1)
        named = dict(extents)
        index = tuple(
            Affine(0, ((f"d{i}", 1),)) if f"d{i}" in named else Affine() for i in range(like.ndim)
        )
        value = Load(source, index, like.dtype)
        return Program(
            extents, (Store(target, index, value, tuple(like.shape), strides, like.dtype),)
        )


Access = tuple[str, tuple[Affine, ...], dict[str, int]]


def _accesses(program: Program, values: Mapping[str, Any]) -> list[Access]:
    """What a program loads and stores, with the distance of neighbours along each variable."""
    found: list[Access] = []
    for e in walk(*(s.value for s in program.stores)):
        if isinstance(e, Load):
            found.append(
                (e.source, e.index, dict(position(e.index, values[e.source].stride()).terms))
            )
    return found + [
        (s.target, s.index, dict(position(s.index, s.strides).terms)) for s in program.stores
    ]


def _turned(program: Program, values: Mapping[str, Any]) -> Program:
    """A program without sums may walk along any variable: along the one whose neighbours lie next
    to each other in what it stores, if that is so in all that it loads."""
    if program.rows or len(program.extents) < 2:
        return program
    last = program.extents[-1][0]
    accesses = [at for *_, at in _accesses(program, values) if len(at) > 1]
    if not accesses or any(at.get(last) == 1 for at in accesses):
        return program
    steps = accesses[-1]
    extents = sorted(program.extents, key=lambda e: -steps.get(e[0], 0))
    return replace(program, extents=tuple(extents))


def _across(program: Program, values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that lie across the rows of a program, with strides that would lie in them."""
    try:
        shape = Shape.of(program)
    except Unsupported:
        return {}
    extents = dict(program.extents)
    if not shape.along or prod(extents[n] for n in shape.along) < LONG:
        return {}
    order = [*shape.rows, *shape.along]
    found = {}
    for name, index, at in _accesses(program, values):
        if values[name].dtype.is_complex:
            continue  # kernels read them in pairs, and have no copy of them
        rows = [n for n in shape.rows if at.get(n) == 1 and extents[n] >= LONG]
        if at.get(shape.along[-1], 0) > 1 and rows and _is_whole(values[name]):
            strides = _strides_in(order, index, values[name].shape)
            if strides is not None:
                found[name] = strides
    return found


def _is_whole(t: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory: a part of a larger tensor is not copied."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) == t.numel()


def _strides_in(
    order: list[str], index: tuple[Affine, ...], shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Strides of a tensor that is read at `index`, so that it lies in the order of variables; None
    if its dimensions mix them."""
    places: list[tuple[int, int]] = []  # of the outermost variable of each dimension
    for i, part in enumerate(index):
        at = sorted(order.index(n) for n in part.names)
        if at and at[-1] - at[0] >= len(at):  # another dimension's variable lies between
            return None
        places.append((at[0] if at else -1, i))
    strides, step = [0] * len(shape), 1
    for _, i in sorted(places, reverse=True):
        strides[i] = step
        step *= shape[i]
    return tuple(strides)
