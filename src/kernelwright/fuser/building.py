"""From nodes of a recorded graph to expressions: views become index arithmetic.

`Builder.at(node, index)` is the element of a node's result at an index. Nodes in memory are loaded;
all others are built from their operands. A view changes the index, a concatenation becomes a choice
between its parts, an elementwise op a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from .expression import ROUNDED, Choice, Expression, Load, Row, Step, rounded
from .index import Affine, CannotIndex, Cut, Space, Split
from .norms import NORM_GRADIENTS, STATISTICS, Gradient
from .recorded_ops import RMS_NORM
from .views import PARTS, VIEWS, Index, packet, shape_of, start_of

aten: Any = torch.ops.aten

# elementwise ops with PyTorch's bits; a result depends on the elements at its own index alone
STEPS = frozenset(
    getattr(aten, name)
    for name in (
        *("add", "sub", "rsub", "mul", "div", "neg", "abs", "pow", "square", "reciprocal"),
        *("sqrt", "rsqrt", "exp", "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "relu"),
        *("leaky_relu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where"),
        *("_to_copy", "clone", "copy", "addcmul", "eq", "ne", "lt", "le", "gt", "ge"),
        *("logical_not", "logical_and", "logical_or", "bitwise_and", "bitwise_or", "bitwise_not"),
        *("silu_backward", "gelu_backward"),
    )
)
# the same, written over their first operand: pure if nothing else reads that
IN_PLACE = {getattr(aten, f"{n}_"): getattr(aten, n) for n in ("add", "sub", "mul", "div", "neg")}
REDUCTIONS = frozenset((aten.mean, aten.sum))


# the variable along a row that no store has
ALONG = "along"


# keyword arguments that say where a result lies, not what it is
PLACE = frozenset(("layout", "device", "pin_memory", "non_blocking", "memory_format"))


class Builder:
    """Expressions over the variables of one program."""

    def __init__(self, space: Space, stored: Collection[fx.Node]) -> None:
        self.space, self.stored = space, stored
        self._known: dict[tuple[fx.Node, Index], Expression] = {}

    def at(self, node: fx.Node, index: Index, inline: bool = False) -> Expression:
        """The element of `node` at `index`; with `inline` not loaded even if it is in memory."""
        key = node, index
        if key not in self._known or inline:
            try:
                made = self._make(node, index, inline)
            except CannotIndex as no:
                no.node = no.node or node
                raise
            if node.meta.get(ROUNDED) and not isinstance(made, Load):
                made = Step(rounded, (made,), (), made.dtype)
            if inline:
                return made
            self._known[key] = made
        return self._known[key]

    def _make(self, node: fx.Node, index: Index, inline: bool) -> Expression:
        if node in self.stored and not inline:
            return Load(node.name, index, node.meta["val"].dtype)
        kind = packet(node)
        if kind in VIEWS:
            return self.at(*VIEWS[kind](self.space, node, index))
        if node.target.__name__ == "getitem":
            return self._part(node, index)
        if kind in STEPS or kind in IN_PLACE:
            return self._step(node, index)
        if kind in MOVES:
            return MOVES[kind](self, node, index)
        if kind in REDUCTIONS:
            return self._reduction(node, index)
        if node.target is RMS_NORM:
            x, shape, weight, eps = node.args
            return self._norm(RMS_NORM, x, (weight,), (eps,), index, len(shape))
        raise CannotIndex(f"{node.target} has no element")

    def _part(self, node: fx.Node, index: Index) -> Expression:
        """One of several results."""
        source, number = node.args
        kind = packet(source)
        if kind in PARTS:
            return self.at(*PARTS[kind](node, source, number, index))
        if kind in STATISTICS:
            x, shape, *scales, eps = source.args
            if number:
                return self._statistic(source, x, len(scales), eps, number, index)
            return self._norm(source.target, x, scales, (eps,), index, len(shape))
        if kind in NORM_GRADIENTS:
            return self._norm_gradient(Gradient.of(source), index)
        raise CannotIndex(f"{source.target} has no element")

    def _step(self, node: fx.Node, index: Index) -> Expression:
        op = node.target
        if op is aten.copy.default:  # what it is copied over does not matter
            source = self._broadcast(node.args[1], shape_of(node), index)
            dtype = node.meta["val"].dtype
            return Step(aten._to_copy.default, (source,), (("dtype", dtype),), dtype)
        if (pure := IN_PLACE.get(packet(node))) is not None:
            op = getattr(pure, op._overloadname)
        shape = shape_of(node)
        args = tuple(
            self._broadcast(a, shape, index) if isinstance(a, fx.Node) else a for a in node.args
        )
        # where the result lies is no part of what it is
        kwargs = tuple((k, v) for k, v in node.kwargs.items() if k not in PLACE)
        return Step(op, args, kwargs, node.meta["val"].dtype)

    def _broadcast(self, node: fx.Node, shape: tuple[int, ...], index: Index) -> Expression:
        own = shape_of(node)
        taken = index[len(shape) - len(own) :]
        return self.at(
            node, tuple(Affine() if n == 1 else i for n, i in zip(own, taken, strict=True))
        )

    def _reduction(self, node: fx.Node, index: Index) -> Expression:
        x, _, keep = (*node.args, False)[:3]
        shape, dtype = shape_of(x), node.meta["val"].dtype
        row = index[:-1] if keep else index
        if shape[-1] == 2 and packet(node) is aten.sum and dtype == torch.float32:
            both = tuple(self.at(x, (*row, Affine(i))) for i in (0, 1))
            # a sum begins with zero, which makes a negative zero a positive one
            return Step(aten.add.Tensor, (Step(aten.add.Tensor, both, (), dtype), 0.0), (), dtype)
        over = self._along(shape[-1], row)
        body = self.at(x, (*row, self._run(over)))
        return Row(node.target, body, over, (), (), None, dtype)

    def _norm(
        self, op: Any, x: fx.Node, scales: Sequence[Any], args: Any, index: Index, dims: int
    ) -> Expression:
        if dims != 1:
            raise CannotIndex("a norm over several dimensions")
        shape = shape_of(x)
        over = self._along(shape[-1], index[:-1])
        along = self._run(over)
        body = self.at(x, (*index[:-1], along))
        parts = tuple(None if s is None else self.at(s, (along,)) for s in scales)
        return Row(op, body, over, args, parts, index[-1], x.meta["val"].dtype)

    def _statistic(
        self, norm: fx.Node, x: fx.Node, scales: int, eps: Any, number: int, index: Index
    ) -> Expression:
        """What a norm finds of a row, whatever its weights are."""
        over = self._along(shape_of(x)[-1], index[:-1])
        body = self.at(x, (*index[:-1], self._run(over)))
        return Row(norm.target, body, over, (eps,), (None,) * scales, None, torch.float32, number)

    def _norm_gradient(self, of: Gradient, index: Index) -> Expression:
        over = self._along(of.shape[0], index[:-1])
        along = self._run(over)
        gradient, x = (self.at(n, (*index[:-1], along)) for n in (of.gradient, of.x))
        statistics = [self.at(n, (*index[:-1], Affine())) for n in of.statistics]
        weight = None if of.weight is None else self.at(of.weight, (along,))
        dtype, others = of.x.meta["val"].dtype, (x, *statistics)
        return Row(of.op, gradient, over, (), (weight,), index[-1], dtype, others=others)

    def _along(self, size: int, row: Index) -> tuple[str, ...]:
        """The variables along a row: the last ones that the row's own index does not have."""
        taken = frozenset().union(*(i.names for i in row)) if row else frozenset()
        over: list[str] = []
        left = size
        for name in reversed(self.space.extents):
            if name in taken:
                continue
            extent = self.space.extents[name]
            if left == 1:
                break
            if left % extent:
                if extent % left == 0 and 1 < left < extent:
                    raise Split(name, left)
                raise CannotIndex(f"no variables of {size} elements")
            over.insert(0, name)
            left //= extent
        if left == size:  # a row of which nothing but its sum is stored
            self.space.extents[ALONG] = size
            return (ALONG,)
        if left > 1:
            raise CannotIndex(f"no variables of {size} elements")
        return tuple(over)

    def _run(self, over: tuple[str, ...]) -> Affine:
        """The index along these variables, the last one fastest."""
        total = Affine()
        for name in over:
            total = total * self.space.extents[name] + Affine(0, ((name, 1),))
        return total


# moves: results whose parts come from elsewhere

# a part of a result: where it starts and stops along a dimension, and its element at an index
Piece = tuple[int, int, Callable[[Index], Expression]]
# a variable of at most so many values may decide element by element
UNROLLED = 4


def _piece(
    builder: Builder, index: Index, dim: int, pieces: list[Piece], dtype: torch.dtype
) -> Expression:
    """The element of the piece in which the index lies. Raises Cut if it may lie in several, and
    what decides is a range of a variable rather than each of its few values."""
    here = index[dim]
    lowest, largest = here.constant, builder.space.largest(here)
    found = [p for p in pieces if p[0] <= largest and lowest < p[1]]
    if len(found) == 1:
        start, _, make = found[0]
        return make((*index[:dim], here + -start, *index[dim + 1 :]))
    name, coefficient = max(here.terms, key=lambda term: term[1])
    rest = here.without(name, 0)
    if builder.space.largest(rest) - rest.constant >= coefficient:
        raise CannotIndex(f"{here} in several parts")
    extent = builder.space.extents[name]
    if extent <= UNROLLED:
        made = []
        for value in range(extent):
            at = tuple(i.without(name, value) for i in index)
            made.append(_piece(builder, at, dim, pieces, dtype))
        return Choice(name, tuple(made), dtype)
    for border, _, _ in found[1:]:
        position = border - rest.constant
        if position % coefficient:
            raise CannotIndex(f"{here} in parts that begin at {border}")
        half = 2 * (position // coefficient) == extent and position // coefficient > 1
        if half and coefficient == 1:
            raise Split(name, extent // 2)
        raise Cut(name, position // coefficient)
    raise CannotIndex(f"{here} in no part")


def _concatenated(builder: Builder, node: fx.Node, index: Index) -> Expression:
    tensors, dim = (*node.args, 0)[:2]
    dim %= len(index)
    pieces: list[Piece] = []
    start = 0
    for t in tensors:
        if len(shape_of(t)) != len(index):
            continue  # an empty tensor of one dimension joins anything
        stop = start + shape_of(t)[dim]
        pieces.append((start, stop, partial(builder.at, t)))
        start = stop
    return _piece(builder, index, dim, pieces, node.meta["val"].dtype)


def _stacked(builder: Builder, node: fx.Node, index: Index) -> Expression:
    tensors, dim = (*node.args, 0)[:2]
    dim %= len(index)

    def of(t: fx.Node, at: Index) -> Expression:
        return builder.at(t, (*at[:dim], *at[dim + 1 :]))

    pieces: list[Piece] = [(i, i + 1, partial(of, t)) for i, t in enumerate(tensors)]
    return _piece(builder, index, dim, pieces, node.meta["val"].dtype)


def _scattered(builder: Builder, node: fx.Node, index: Index) -> Expression:
    """slice_scatter: a part of the first tensor is that of the second."""
    given = (*node.args, *(None, None, 0, None, None, 1)[len(node.args) :])
    x, part, dim, start, _, step = given[:6]
    dim %= len(index)
    start, step = start_of(start, shape_of(x)[dim]), step or 1
    stop, end = start + shape_of(part)[dim] * step, shape_of(x)[dim]
    dtype = node.meta["val"].dtype

    def elsewhere(lead: int, at: Index) -> Expression:
        return builder.at(x, (*at[:dim], at[dim] + lead, *at[dim + 1 :]))

    if step == 1:
        ranges: list[Piece] = [
            (0, start, partial(elsewhere, 0)),
            (start, stop, partial(builder.at, part)),
            (stop, end, partial(elsewhere, stop)),
        ]
        return _piece(builder, index, dim, [r for r in ranges if r[0] < r[1]], dtype)
    if start >= step or stop < end:
        raise CannotIndex("a part that ends before its tensor does")
    quotient, remainder = builder.space.divided(index[dim], step)

    def every(at: Index) -> Expression:
        return builder.at(part, (*at[:dim], quotient, *at[dim + 1 :]))

    def between(value: int, at: Index) -> Expression:
        return builder.at(x, (*at[:dim], quotient * step + value, *at[dim + 1 :]))

    found: list[Piece] = [
        (v, v + 1, every if v == start else partial(between, v)) for v in range(step)
    ]
    return _piece(builder, (*index[:dim], remainder, *index[dim + 1 :]), dim, found, dtype)


def is_known_padding(node: fx.Node) -> bool:
    """Whether a constant_pad_nd pads floats, and crops nothing."""
    return node.meta["val"].is_floating_point() and min(node.args[1]) >= 0


def _padded(builder: Builder, node: fx.Node, index: Index) -> Expression:
    """constant_pad_nd: a tensor among elements of one value."""
    x, borders, value = (*node.args, 0)[:3]
    dtype = node.meta["val"].dtype
    value = torch.tensor(value, dtype=dtype).item()

    def constant(at: Index) -> Expression:
        return Step(aten.full.default, (value,), (), dtype)

    def inside(dim: int, at: Index) -> Expression:
        """The element where the dimensions from the last down to `dim` may lie in the padding."""
        last = len(index) - 1
        if 2 * (last - dim) >= len(borders):
            return builder.at(x, at)
        before, after = borders[2 * (last - dim) : 2 * (last - dim) + 2]
        end = before + shape_of(x)[dim]
        pieces: list[Piece] = [
            (0, before, constant),
            (before, end, partial(inside, dim - 1)),
            (end, end + after, constant),
        ]
        return _piece(builder, at, dim, [p for p in pieces if p[0] < p[1]], dtype)

    return inside(len(index) - 1, index)


def _repeated(builder: Builder, node: fx.Node, index: Index) -> Expression:
    source = node.args[0]
    shape = shape_of(source)
    taken = index[len(index) - len(shape) :]
    inner = [builder.space.divided(i, n)[1] for i, n in zip(taken, shape, strict=True)]
    return builder.at(source, tuple(inner))


def _as_complex(builder: Builder, node: fx.Node, index: Index) -> Expression:
    parts = tuple(builder.at(node.args[0], (*index, Affine(part))) for part in (0, 1))
    return Step(aten.complex.default, parts, (), node.meta["val"].dtype)


def _as_real(builder: Builder, node: fx.Node, index: Index) -> Expression:
    dtype = node.meta["val"].dtype

    def of(op: Any, at: Index) -> Expression:
        return Step(op, (builder.at(node.args[0], at[:-1]),), (), dtype)

    pieces: list[Piece] = [(0, 1, partial(of, aten.real)), (1, 2, partial(of, aten.imag))]
    return _piece(builder, index, len(index) - 1, pieces, dtype)


def _zero(builder: Builder, node: fx.Node, index: Index) -> Expression:
    """Zeros, or memory that nobody has written to yet, where any number will do."""
    return Step(aten.full.default, (0,), (), node.meta["val"].dtype)


def _of_part(builder: Builder, node: fx.Node, index: Index) -> Expression:
    """slice_backward: the gradient of a part, among zeros."""
    part, shape, dim, start, _, step = node.args
    dim %= len(index)
    start = start_of(start, shape[dim])
    if step == 1:
        return _among_zeros(builder, node, index, dim, start, partial(builder.at, part))
    if start >= step or start + shape_of(part)[dim] * step < shape[dim]:
        raise CannotIndex("a part that ends before its tensor does")
    quotient, remainder = builder.space.divided(index[dim], step)

    def every(at: Index) -> Expression:
        return builder.at(part, (*at[:dim], quotient, *at[dim + 1 :]))

    zero = partial(_zero, builder, node)
    pieces: list[Piece] = [(v, v + 1, every if v == start else zero) for v in range(step)]
    inside = (*index[:dim], remainder, *index[dim + 1 :])
    return _piece(builder, inside, dim, pieces, node.meta["val"].dtype)


def _of_one(builder: Builder, node: fx.Node, index: Index) -> Expression:
    """select_backward: the gradient of one of several, among zeros."""
    part, shape, dim, number = node.args
    dim, number = dim % len(index), number % shape[dim]

    def one(at: Index) -> Expression:
        return builder.at(part, (*at[:dim], *at[dim + 1 :]))

    return _among_zeros(builder, node, index, dim, number, one, 1)


def _among_zeros(
    builder: Builder,
    node: fx.Node,
    index: Index,
    dim: int,
    start: int,
    make: Callable[[Index], Expression],
    size: int | None = None,
) -> Expression:
    """What `make` makes of `size` positions of a dimension from `start` on, and zeros elsewhere."""
    size = shape_of(node.args[0])[dim] if size is None else size
    end = shape_of(node)[dim]
    zero = partial(_zero, builder, node)
    pieces: list[Piece] = [
        (0, start, zero),
        (start, start + size, make),
        (start + size, end, zero),
    ]
    return _piece(builder, index, dim, [p for p in pieces if p[0] < p[1]], node.meta["val"].dtype)


MOVES: dict[Any, Callable[[Builder, fx.Node, Index], Expression]] = {
    aten.cat: _concatenated,
    aten.stack: _stacked,
    aten.slice_scatter: _scattered,
    aten.constant_pad_nd: _padded,
    aten.repeat: _repeated,
    aten.view_as_complex: _as_complex,
    aten.view_as_real: _as_real,
    **dict.fromkeys((aten.empty_like, aten.new_empty_strided), _zero),
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), _zero),
    aten.slice_backward: _of_part,
    aten.select_backward: _of_one,
}
