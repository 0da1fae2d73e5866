"""CUDA C++ of a program. For PyTorch's bits each step is rounded to its dtype, and sums are made in
ATen's order; otherwise values stay in float32 until they are stored.

One row is shared by the threads of a `Spread`; a thread holds vectors of V neighbours. Everything
along a row is known when the kernel is compiled; the number of rows and the strides between them
are arguments, so that one kernel serves every resolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any

import torch

from ..backends import Unsupported
from ..backends.cuda import TYPES
from ..ops.row.order import free_threads, mean_order
from .cuda_steps import (
    GRADIENTS,
    computed_type,
    float_literal,
    normed,
    number,
    step_maker,
    type_name,
)
from .expression import Choice, Load, Step, walk
from .index import Space
from .lowering import COMPLEX, Lowered, Normed, Shape, Statistics, lowered, operands
from .program import Program, Store
from .row_layout import RowLayout, widest_vector
from .row_orders import order_of, scratch_name, threads_of

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies that a program loads or stores."""

    strides: tuple[int, ...]
    dtype: torch.dtype

    def as_real(self) -> Tensor:
        """A complex tensor as one of pairs, any other one as it is."""
        if self.dtype not in COMPLEX:
            return self
        return Tensor((*(2 * s for s in self.strides), 1), COMPLEX[self.dtype])


@dataclass
class Kernel:
    """A kernel's source, and what it has to be given."""

    code: str
    block: int
    rows_per_block: int
    # (name, elements to add to its address), in the order of the kernel's arguments
    pointers: list[tuple[str, int]]
    # extents of the variables that count rows, outermost first
    extents: list[int]
    # for each pointer a stride for each of these variables
    strides: list[list[int]]
    alignment: int  # of every address, in elements of its dtype
    extra: list[int] = field(default_factory=list)  # numbers after the others


ENTRY = "kernelwright_program"


def kernel(program: Program, tensors: Mapping[str, Tensor], exact: bool = True) -> Kernel:
    """The kernel of a program whose tensors lie so; unless `exact` it rounds at its stores only."""
    return _Emitter(program, tensors, exact).made()


@dataclass
class _Emitter:
    program: Program
    tensors: Mapping[str, Tensor]
    exact: bool

    def __post_init__(self) -> None:
        self.tensors = {name: t.as_real() for name, t in self.tensors.items()}
        self.extents = dict(self.program.extents)
        self.space = Space(self.extents)
        self.shape = Shape.of(self.program)
        self.width = prod(self.extents[n] for n in self.shape.along)
        self.rows = prod(self.extents[n] for n in self.shape.rows)
        self.values = [lowered(s.value, self.space) for s in self.program.stores]
        self.order = threads_of(self._statistics(), self.width, self.rows)
        for s in self._statistics():
            self._orders[s] = order_of(s, self.width, self.rows).norm.replace("MeanRms", "MeanSum")
        size = min((s.dtype.itemsize for s in self.program.stores), default=4)
        widest = widest_vector(self.shape, self.extents, size)
        self.V = self.order.vector if self.order else widest
        self.threads = (
            self.order.threads if self.order else free_threads(self.width, self.V, normed=False)
        )
        self.layout = RowLayout(self.shape, self.extents, self.V)
        self.accesses = self.layout.accesses
        self.names: dict[Any, str] = {}
        self.numbers = count()

    # what an expression depends on

    def _depends(self, e: Any) -> bool:
        """Whether it differs along a row."""
        if e not in self._known:
            self._known[e] = self._find_depends(e)
        return self._known[e]

    _known: dict[Any, bool] = field(default_factory=dict)

    def _find_depends(self, e: Any) -> bool:
        if isinstance(e, Statistics):
            return False
        if isinstance(e, Load):
            return any(n in self.shape.along for i in e.index for n in i.names)
        if isinstance(e, Choice) and e.name in self.shape.along:
            return True
        return any(map(self._depends, operands(e)))

    def _level(self, e: Any) -> int:
        """How many sums along the row have to be made before it."""
        if e not in self._levels:
            below = max(map(self._level, operands(e)), default=0)
            self._levels[e] = below + isinstance(e, Statistics)
        return self._levels[e]

    _levels: dict[Any, int] = field(default_factory=dict)

    def _statistics(self) -> list[Statistics]:
        found: dict[Statistics, None] = {}

        def look(e: Any) -> None:
            for i in operands(e):
                look(i)
            if isinstance(e, Statistics):
                found.setdefault(e)

        for value in self.values:
            look(value)
        return list(found)

    # the kernel

    def made(self) -> Kernel:
        block = max(128, self.threads)
        stores = list(zip(self.program.stores, self.values, strict=True))
        statistics = self._statistics()
        last = max((self._level(v) for v in self.values), default=0)
        self.held = self._held(stores, statistics)
        self.early: dict[str, tuple[str, str]] = {}
        body: list[str] = []
        measured = False
        for level in range(last + 1):
            ready = [s for s in statistics if self._level(s) == level + 1]
            done = [(s, v) for s, v in stores if self._level(v) == level]
            body += self._loop(level, ready, done)
            for s in ready:
                # the sums before it may still be read by threads of other warps
                body += ["  __syncthreads();"] if measured and self.threads > 32 else []
                body += self._measured(s)
                measured = True
        head = self._head(block, bool(statistics))
        code = "\n".join([*head, *self._vectors(), *body, "}", ""])
        pointers = sorted(self.accesses.values(), key=lambda a: a.number)
        return Kernel(
            code.replace("@STRUCT@", self._struct()),
            block,
            block // self.threads,
            [(a.name, a.constant) for a in pointers],
            [self.extents[n] for n in self.shape.rows],
            [a.strides for a in pointers],
            self.V,
        )

    def _vectors(self) -> list[str]:
        """All loads of vectors, before anything waits for one of them."""
        loads = [f"    {name}[k].load({where});" for name, (_, where) in self.early.items()]
        if not loads:
            return []
        return [
            *(f"  {kind} {name}[S::K];" for name, (kind, _) in self.early.items()),
            "#pragma unroll",
            "  for (int k = 0; k < S::K; k++) if (S::inside(k)) {",
            f"    const int base = S::vector(k) * {self.V};",
            *loads,
            "  }",
        ]

    def _struct(self) -> str:
        count, rows = len(self.accesses), max(len(self.shape.rows), 1)
        return (
            f"struct Args {{ void* at[{count}]; i64 strides[{count}][{rows}]; "
            f"unsigned extents[{rows}]; unsigned count; }};"
        )

    def _head(self, block: int, sums: bool) -> list[str]:
        spread = f"using S = Spread<{self.width}, {self.V}, {self.threads}>;"
        lines = [
            '#include "ops/row/norms.cuh"',
            '#include "ops/gelu/cuda.cuh"',
            *(['#include "fuser/gradients.cuh"'] if self._has_gradients() else []),
            "using namespace kernelwright;",
            "@STRUCT@",
            f'extern "C" __global__ void __launch_bounds__({block})',
            f"{ENTRY}(const __grid_constant__ Args a) {{",
            f"  {spread}",
            f"  const i64 number = (i64)blockIdx.x * {block // self.threads} + "
            f"threadIdx.x / {self.threads};",
            "  const bool live = number < a.count;",
            "  unsigned row = live ? unsigned(number) : a.count - 1;",
        ]
        if not sums:
            lines.append("  if (!live) return;")
        for i in reversed(range(len(self.shape.rows))):
            name = self.shape.rows[i]
            if i:
                lines.append(f"  const unsigned {name} = row % a.extents[{i}];")
                lines.append(f"  row /= a.extents[{i}];")
            else:
                lines.append(f"  const unsigned {name} = row;")
        for access in self.accesses.values():
            terms = [
                f"{name} * a.strides[{access.number}][{i}]"
                for i, name in enumerate(self.shape.rows)
                if access.strides[i]
            ]
            offset = " + ".join(terms) if terms else "0"
            kind = type_name(access.dtype)
            lines.append(
                f"  {kind}* const p{access.number} = ({kind}*)a.at[{access.number}] + {offset};"
            )
        if self.order:
            for n in dict.fromkeys(self._orders.values()):
                lines.append(
                    f"  __shared__ float {scratch_name(n)}[Scratch<{n}, S, {block}>::FLOATS];"
                )
        return lines

    def _has_gradients(self) -> bool:
        steps = (e for e in walk(*(s.value for s in self.program.stores)) if isinstance(e, Step))
        return any(getattr(e.op, "overloadpacket", e.op) in GRADIENTS for e in steps)

    _orders: dict[Statistics, str] = field(default_factory=dict)

    def _held(self, stores: list[tuple[Store, Lowered]], statistics: list[Statistics]) -> set[Any]:
        """Values along the row that a later level reads again: they stay in registers."""
        held: set[Any] = {s.x for s in statistics if self._depends(s.x)}

        def look(e: Any, level: int) -> None:
            if isinstance(e, Statistics):
                return
            again = any(self._level(s) == self._level(e) + 1 for s in statistics)
            computed = again and not isinstance(e, Load)
            if computed and self._level(e) < level and self._depends(e):
                held.add(e)
                return
            for i in operands(e):
                look(i, level)

        for _, value in stores:
            look(value, self._level(value))
        for s in statistics:
            look(s.x, self._level(s.x))
        if any(e.dtype == torch.float64 for e in held):
            raise Unsupported("sums of float64")
        return {e for e in held if not isinstance(e, Statistics)}

    def _loop(
        self, level: int, ready: list[Statistics], done: list[tuple[Store, Lowered]]
    ) -> list[str]:
        """Everything of one level: what sums are made of, and what is stored."""
        wanted = [e for e in self.held if self._level(e) == level]
        roots = [*(s.x for s in ready), *wanted, *(v for _, v in done)]
        if not roots:
            return []
        self.scalars: list[str] = []
        self.inner: list[str] = []
        self.done: dict[Any, list[str]] = {}
        self.vectors: dict[Any, str] = {}
        self.texts: dict[str, str] = {}
        for e in dict.fromkeys(roots):
            lanes = self._lanes(e, level)
            if e in self.held and self._level(e) == level:
                for i, name in enumerate(lanes):
                    self.inner.append(f"{self._array(e)}[k][{i}] = {name};")
        for store, value in done:
            self._stored(store, self._lanes(value, level))
        arrays = [f"  float {self._array(e)}[S::K][{self.V}];" for e in wanted]
        loop = [
            "#pragma unroll",
            "  for (int k = 0; k < S::K; k++) if (S::inside(k)) {",
            f"    const int base = S::vector(k) * {self.V};",
            *(f"    {line}" for line in self.inner),
            "  }",
        ]
        return [*(f"  {line}" for line in self.scalars), *arrays, *loop]

    def _array(self, e: Any) -> str:
        return self.names.setdefault(e, f"held{len(self.names)}")

    def _measured(self, s: Statistics) -> list[str]:
        """The statistics of a row, from the values that its threads hold."""
        order = self._orders[s]
        name, array = self.names.setdefault(s, f"sum{len(self.names)}"), self._array(s.x)
        get = f"[&](int k, int i) {{ return {array}[k][i]; }}"
        if s.op is aten.mean.dim:
            factor = mean_order(self.width, self.rows, self.V).factor
            total = f"{order}::template of<S>({get}, {scratch_name(order)})"
            return [f"  const float {name} = __fmul_rn({total}, {float_literal(factor)});"]
        if s.op is aten.sum.dim_IntList:
            total = f"{order}::template of<S>({get}, {scratch_name(order)})"
            return [f"  const float {name} = {total};"]
        eps = s.args[0]
        if eps is None:
            eps = torch.finfo(s.dtype).eps
        call = (
            f"{name}.template measure<S>({get}, {float_literal(eps)}, 0.f, {scratch_name(order)});"
        )
        return [f"  {order} {name};", f"  {call}"]

    # expressions

    def _lanes(self, e: Any, level: int) -> list[str]:
        """The names of the values of an expression, one for each lane."""
        if e in self.done:
            return self.done[e]
        if isinstance(e, Statistics):
            lanes = [self.names[e]] * self.V
        elif e in self.held and self._level(e) < level:
            lanes = [f"{self._array(e)}[k][{i}]" for i in range(self.V)]
        elif isinstance(e, Load):
            lanes = self._loaded(e)
        elif isinstance(e, Choice):
            lanes = self._chosen(e, level)
        else:
            lanes = self._computed(e, level)
        self.done[e] = lanes
        return lanes

    def _computed(self, e: Any, level: int) -> list[str]:
        if isinstance(e, Normed):
            of = self.names[e.of]
            given = [self._lanes(e.x, level)]
            given += [self._lanes(s, level) if s is not None else [""] * self.V for s in e.scales]
            lines = [normed(of, e, [g[i] for g in given], self.exact) for i in range(self.V)]
        else:
            args = [
                self._lanes(a, level) if isinstance(a, Lowered) else [number(a)] * self.V
                for a in e.args
            ]
            types = [a.dtype if isinstance(a, Lowered) else None for a in e.args]
            make = step_maker(e, types, self.exact)
            lines = [make([a[i] for a in args]) for i in range(self.V)]
        if not self._depends(e):
            return [self._named(self.scalars, lines[0], e.dtype)] * self.V
        return [self._named(self.inner, line, e.dtype) for line in lines]

    def _named(self, into: list[str], text: str, dtype: torch.dtype) -> str:
        """A name for a value; the same one if it was computed before."""
        if text.isidentifier():
            return text
        if text not in self.texts:
            name = self.texts[text] = f"e{next(self.numbers)}"
            into.append(f"const {computed_type(dtype)} {name} = {text};")
        return self.texts[text]

    def _chosen(self, e: Choice, level: int) -> list[str]:
        pieces = [self._lanes(p, level) for p in e.pieces]
        if e.name in self.shape.along and not self.layout.rest[e.name]:
            return [pieces[self.layout.lane[e.name][i]][i] for i in range(self.V)]
        if e.name in self.shape.along and any(self.layout.lane[e.name]):
            raise Unsupported("a choice inside a vector")
        value = e.name if e.name in self.shape.rows else f"({self.layout.rest[e.name]})"
        lines = []
        for i in range(self.V):
            text = pieces[-1][i]
            for k in reversed(range(len(pieces) - 1)):
                text = f"({value} == {k} ? {pieces[k][i]} : {text})"
            lines.append(self._named(self.inner, text, e.dtype))
        return lines

    # memory

    def _loaded(self, e: Load) -> list[str]:
        access, lanes = self.layout.address(
            e.source, self.tensors[e.source].strides, e.index, e.dtype
        )
        kind, offset = type_name(e.dtype), self.layout.offset(access)
        into = self.inner if access.dynamic or len(set(lanes)) > 1 else self.scalars
        within = self.V > 1 and max(lanes) < self.V and len(set(lanes)) > 1
        if within and e.dtype in TYPES and self.layout.is_aligned(access):
            name = f"v{access.number}"
            self.early.setdefault(name, (f"Vec<{kind}, {self.V}>", f"p{access.number} + {offset}"))
            return [f"{name}[k].get({lane})" for lane in lanes]
        found = []
        for lane in lanes:
            key = "single", access.number, lane
            if key not in self.vectors:
                # what is the same along a row is declared for all levels
                of_row = into is self.scalars
                number = f"row{next(self.numbers)}" if of_row else f"{len(self.vectors)}"
                name = self.vectors[key] = f"x{access.number}_{number}"
                value = f"widen(p{access.number}[{offset} + {lane}])"
                kind = computed_type(e.dtype)
                if e.dtype not in TYPES:
                    value = f"{kind}(p{access.number}[{offset} + {lane}])"
                into.append(f"const {kind} {name} = {value};")
            found.append(self.vectors[key])
        return found

    def _stored(self, store: Store, lanes: list[str]) -> None:
        access, places = self.layout.address(
            store.target, self.tensors[store.target].strides, store.index, store.dtype
        )
        kind, offset = type_name(store.dtype), self.layout.offset(access)
        if store.dtype not in TYPES and store.dtype != torch.bool:
            raise Unsupported(f"results of {store.dtype}")
        whole = store.dtype in TYPES
        dense = (
            whole
            and places == list(range(self.V))
            and self.V > 1
            and self.layout.is_aligned(access)
        )
        self.inner.append("if (live) {")
        if dense:
            name = f"o{access.number}"
            self.inner.append(f"Vec<{kind}, {self.V}> {name};")
            for i in range(0, self.V, 2):
                self.inner.append(f"{name}.set({i}, {lanes[i]}, {lanes[i + 1]});")
            self.inner.append(f"{name}.store_whole(p{access.number} + {offset});")
        else:
            for lane, place in zip(lanes, places, strict=True):
                value = f"narrow<{kind}>({lane})" if whole else f"{lane} != 0.f"
                self.inner.append(f"p{access.number}[{offset} + {place}] = {value};")
        self.inner.append("}")
