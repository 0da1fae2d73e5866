"""Runs a program with PyTorch's own ops, one for each expression: what a kernel of it has to give.

This is the program on machines without a GPU, and what its plan is tested with: it sees what the
program says, not the graph that it was made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.fp8.reference import quantize
from .eight_bit_rows import eight_bit_rows
from .expression import Choice, Expression, Load, Row, Step, walk
from .index import Affine
from .program import Program, Store

aten: Any = torch.ops.aten


def run(program: Program, tensors: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
    """Write what the program stores into `outputs`."""
    runner = _Run(program, tensors, next(iter(outputs.values())).device)
    for e in _in_order(program.stores):
        runner.values[e] = runner.value(e)
    for s in program.stores:
        into = runner.view(outputs[s.target], s.index)
        into.copy_(runner.values[s.value].expand(into.shape))
    for made in eight_bit_rows(program):
        rows, scale = quantize(outputs[made.source])
        outputs[made.rows].copy_(rows)
        outputs[made.scale].copy_(scale)


# every run of a block asks for the same ones
@lru_cache(4096)
def _placed(
    index: tuple[Affine, ...],
    variables: tuple[tuple[str, int], ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
) -> tuple[list[int], list[int], int]:
    """Shape, strides and first element of a view that has a dimension for each variable."""
    extents, total = dict(variables), Affine()
    for part, size, stride in zip(index, sizes, strides, strict=True):
        lowest = part.constant + sum(min(0, c * (extents[n] - 1)) for n, c in part.terms)
        largest = part.constant + sum(max(0, c * (extents[n] - 1)) for n, c in part.terms)
        assert 0 <= lowest <= largest < size, f"{part} outside of {size}"
        total = total + part * stride
    coefficients = dict(total.terms)
    shape = [extent if n in coefficients else 1 for n, extent in variables]
    return shape, [coefficients.get(n, 0) for n, _ in variables], total.constant


@lru_cache(1024)
def _in_order(stores: tuple[Store, ...]) -> tuple[Expression, ...]:
    return tuple(walk(*(s.value for s in stores)))


# activations that a CPU computes by another function where too few elements for a vector are left
BY_LANES = {
    *(aten.sigmoid, aten.silu, aten.gelu, aten.softplus, aten.mish, aten.elu),
    *(aten.silu_backward, aten.gelu_backward),
}
# elements that it computes at once
AT_ONCE = 32 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 16


def _lies_in_short_runs(x: Tensor) -> bool:
    """Whether its elements fill no vector, as those of a part of the tensor that the block's own
    forward reads."""
    run = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride != run:
                break
            run *= size
    return run < min(AT_ONCE, x.numel())


def _by_vectors(op: Any, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """An op of these elements, all of which lie in full vectors."""
    tensors = torch.broadcast_tensors(*(a for a in args if isinstance(a, Tensor)))
    shape, count = tensors[0].shape, tensors[0].numel()
    padded = iter([F.pad(t.reshape(-1), (0, -count % AT_ONCE)) for t in tensors])
    result: Tensor = op(*(next(padded) if isinstance(a, Tensor) else a for a in args), **kwargs)
    return result[:count].view(shape)


class _Run:
    def __init__(
        self, program: Program, tensors: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self.variables = program.extents
        self.names = [n for n, _ in program.extents]
        self.extents = dict(program.extents)
        self.shape = [e for _, e in program.extents]
        self.tensors, self.device = tensors, device
        self.values: dict[Expression, Tensor] = {}
        # variables that say which of several expressions is meant
        names = {e.name for e in _in_order(program.stores) if isinstance(e, Choice)}
        self.chosen = [i for i, (n, size) in enumerate(self.variables) if n in names and size > 1]

    def value(self, e: Expression) -> Tensor:
        """An expression for all values of the variables: one dimension for each of them, of size
        one where it does not depend on it."""
        if isinstance(e, Load):
            return self._load(e)
        if isinstance(e, Step):
            return self._step(e)
        if isinstance(e, Choice):
            return self._choice(e)
        return self._row(e)

    def _step(self, e: Step) -> Tensor:
        args = [self.values[a] if isinstance(a, Expression) else a for a in e.args]
        if e.op is aten.full.default:
            value: Any = args[0]
            return torch.full([1] * len(self.shape), value, dtype=e.dtype, device=self.device)
        if e.op is aten.gelu_backward.default:  # a CPU's in 16 bits does not broadcast
            args = list(torch.broadcast_tensors(*args))
        by_lanes = self.device.type == "cpu" and getattr(e.op, "overloadpacket", None) in BY_LANES
        if by_lanes and any(isinstance(a, Tensor) and self._is_a_part(a) for a in args):
            result = _by_vectors(e.op, args, dict(e.kwargs))
        else:
            result = e.op(*args, **dict(e.kwargs))
        return result if result.dtype == e.dtype else result.to(e.dtype)

    def _is_a_part(self, x: Tensor) -> bool:
        """Whether the block's own forward computes these elements together with others."""
        halved = any(x.shape[place] == 1 for place in self.chosen)
        return halved or _lies_in_short_runs(x)

    def _load(self, e: Load) -> Tensor:
        return self.view(self.tensors[e.source], e.index)

    def view(self, source: Tensor, index: tuple[Affine, ...]) -> Tensor:
        """The elements of a tensor at an index, one dimension for each variable."""
        shape, strides, first = _placed(index, self.variables, source.shape, source.stride())
        return source.as_strided(shape, strides, source.storage_offset() + first)

    def _choice(self, e: Choice) -> Tensor:
        place = self.names.index(e.name)
        parts = [self.values[p] for p in e.pieces]
        sizes = [max(p.shape[d] for p in parts) for d in range(len(self.names))]
        return torch.cat([p.expand(sizes) for p in parts], place)

    def _row(self, e: Row) -> Tensor:
        x = self.values[e.x]
        size = prod(self.extents[n] for n in e.over)
        rows = [n for n in self.names if n not in e.over]
        order = [self.names.index(n) for n in (*rows, *e.over)]
        operands = [self.values[o].shape for o in (e.x, *e.others)]
        sizes = [
            self.extents[n] if n in e.over else max(shape[i] for shape in operands)
            for i, n in enumerate(self.names)
        ]
        whole = x.expand(sizes).permute(order)
        lead = whole.shape[: len(rows)]
        table = whole.reshape(*lead, size)
        if e.at is None:
            if e.part:
                result = e.op(table, [size], *e.scales, *e.args)[e.part]
            else:
                result = e.op(table, [-1], True)
            back = [order.index(i) for i in range(len(order))]
            return result.reshape([*lead, *[1] * len(e.over)]).permute(back)
        scales = [None if s is None else self._along(s, e.over, size) for s in e.scales]
        others = [self._of_rows(o, e.over, rows, lead, i == 0) for i, o in enumerate(e.others)]
        result = e.op(table, *others, [size], *scales, *e.args)
        result = (result[0] if isinstance(result, tuple) else result).contiguous()
        index = [
            Affine(0, ((n, 1),)) if s > 1 else Affine() for n, s in zip(rows, lead, strict=True)
        ]
        return self.view(result, (*index, e.at))

    def _of_rows(
        self, e: Expression, over: tuple[str, ...], rows: list[str], lead: torch.Size, whole: bool
    ) -> Tensor:
        """Another operand, as a table of the same rows: whole ones, or one value each."""
        sizes = dict(zip(rows, lead, strict=True))
        sizes |= {n: self.extents[n] if whole else 1 for n in over}
        order = [self.names.index(n) for n in (*rows, *over)]
        value = self.values[e].expand([sizes[n] for n in self.names]).permute(order)
        return value.reshape(*lead, -1)

    def _along(self, scale: Expression, over: tuple[str, ...], size: int) -> Tensor:
        """A weight of a norm as a row of its own."""
        value = self.values[scale]
        full = value.expand(
            [self.extents[n] if n in over else value.shape[i] for i, n in enumerate(self.names)]
        )
        rows = [i for i, n in enumerate(self.names) if n not in over]
        order = rows + [self.names.index(n) for n in over]
        return full.permute(order).reshape(-1, size)[0].contiguous()
