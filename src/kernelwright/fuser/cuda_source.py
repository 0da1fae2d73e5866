"""CUDA C++ of a program. For PyTorch's bits each step is rounded to its dtype, and sums are made in
ATen's order; otherwise values stay in float32 until they are stored, and are summed in any order.
What is stored and read again in the same program is rounded in between, as if it were read back.

Everything along a row is known when the kernel is compiled; the number of rows and the strides
between them are arguments, so that one kernel serves every resolution. Which threads have which
rows is in row_sharing.py, where they find them in cuda_rows.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from ..backends import Unsupported
from ..backends.cuda import TYPES
from ..ops.gelu.cuda import AHEAD, RESIDENT
from .cuda_kernel import Kernel, Tensor, divisor
from .cuda_rows import first_row, head_lines, row_lines
from .cuda_steps import float_literal, type_name
from .cuda_values import Values, Vector
from .eight_bit_rows import EightBitRows, contiguous_strides
from .expression import Load
from .index import Affine
from .lowering import Lowered, Statistics, inside, operands
from .norms import NORM_GRADIENTS
from .program import Program, Store
from .row_orders import scratch_name
from .row_sharing import RowSharing

aten: Any = torch.ops.aten


def kernel(program: Program, tensors: Mapping[str, Tensor], exact: bool = True) -> Kernel:
    """The kernel of a program whose tensors lie so; unless `exact` it rounds at its stores only."""
    return Emitter(program, tensors, exact).made()


class Emitter(RowSharing):
    """Writes the kernel of a program, row by row."""

    def made(self) -> Kernel:
        # the first time tells what is loaded, and so what there is room for
        vectors = self._written(frozenset())[0].vectors
        self.take_several_rows([v.access for v, _ in vectors.values()])
        v, body = self._written(self.late(vectors))
        pointers = sorted(self.layout.accesses.values(), key=lambda a: a.number)
        strides = [s * access.dtype.itemsize for access in pointers for s in access.strides or [0]]
        wide = any(not 0 <= s < 2**32 for s in strides)
        extents = self.extents_of_rows
        divisors = [number for e in extents or [1] for number in divisor(e)]
        head, row = head_lines(self, len(pointers), wide), row_lines(self, pointers)
        body = self._looked_up(v, row, body) if self.tables else [*row, *body]
        return Kernel(
            "\n".join([*head, *body, "}", ""]),
            self.block,
            self.threads,
            [(a.name, a.constant) for a in pointers],
            extents,
            [*strides, *divisors, prod(extents)],
            f"{len(strides)}{'q' if wide else 'I'}{len(divisors) + 1}I",
            self.V,
            *((RESIDENT, AHEAD) if self.tables else ()),
        )

    def _written(self, late: frozenset[int]) -> tuple[Values, list[str]]:
        v = Values(
            **self._of_values(late),
            vector_index="[k]" if self.by_row else "",
            row_index=(lambda a: "[r]" if self.differs(a) or self.tables else ""),
            tables=self.tables,
        )
        v.held = self._held(v)
        body: list[str] = []
        measured = False
        for level in range(max((v.level(value) for _, value in self.stores), default=0) + 1):
            ready = [s for s in self.statistics if v.level(s) == level + 1]
            body += self._loop(v, level, ready)
            for s in ready:
                # the sums before it may still be read by threads of other warps
                body += ["  __syncthreads();"] if measured and self.threads > 32 else []
                body += self._measured(v, s)
                measured = True
        if self.tables:
            return v, body
        early = self._early(v)
        declared = [self._declared(x) for x in early]
        shared = [x for x in early if not self.differs(x.access)]
        loads = [*declared, *self._loads(v, shared)]
        if not self.by:
            return v, [*loads, *body]
        variable = self.shape.rows.index(self.by)
        each_row = ["#pragma unroll", f"  for (int r = 0; r < {self.together}; r++) {{"]
        for a in self.layout.accesses.values():
            if self.differs(a):
                kind, step = type_name(a.dtype), f"(Bytes)r * a.strides[{a.number}][{variable}]"
                address = f"({kind}*)((char*)begin{a.number} + {step})"
                each_row.append(f"  {kind}* const p{a.number} = {address};")
        apart = [x for x in early if self.differs(x.access)]
        first = [*each_row, *self._loads(v, apart), "  }"]
        return v, [*loads, *first, *each_row, *body, "  }"]

    def _of_values(self, late: frozenset[int]) -> dict[str, Any]:
        """What the values of every kernel of this program are written with."""
        return {
            "exact": self.exact,
            "V": self.V,
            "shape": self.shape,
            "layout": self.layout,
            "strides": {name: t.strides for name, t in self.tensors.items()},
            "late": late,
            "rounds": self._rounded(),
        }

    def _rounded(self) -> frozenset[Any]:
        """Values that are stored and that others are made of. These are rounded before, whatever
        the tier: then results do not depend on whether what reads them is in this program."""
        used = {o for e in inside([v for _, v in self.stores]) for o in operands(e)}
        return frozenset(v for s, v in self.stores if v in used and v.dtype == s.dtype)

    def _early(self, v: Values) -> list[Vector]:
        return [vector for n, (vector, _) in v.vectors.items() if n not in v.late]

    def _looked_up(self, v: Values, row: list[str], body: list[str]) -> list[str]:
        """The body of a kernel with tables: its blocks stay and loop over all vectors, and a thread
        loads several of them at once."""
        early = self._early(v)
        each = [
            "#pragma unroll",
            f"  for (int r = 0; r < {AHEAD}; r++)",
            "  if (const unsigned number = start + r * apart; number < vectors) {",
            *row,
        ]
        return [
            *(f"  __shared__ Halves<{form}> {name};" for form, name in self.tables.items()),
            *(f"  {name}.fill(threadIdx.x, {self.block});" for name in self.tables.values()),
            "  __syncthreads();",
            f"  const unsigned vectors = a.count * {self.threads};",
            f"  const unsigned apart = gridDim.x * {self.block};",
            f"  unsigned start = blockIdx.x * {self.block} + threadIdx.x;",
            f"  for (; start < vectors; start += {AHEAD} * apart) {{",
            *map(self._declared, early),
            *[*each, *self._loads(v, early), "  }"],
            *[*each, *body, "  }"],
            "  }",
        ]

    def _declared(self, x: Vector) -> str:
        rows = f"[{self.together}]" if self.differs(x.access) else ""
        rows = f"[{AHEAD}]" if self.tables else rows
        vectors = "[S::K]" if self.by_row else ""
        return f"  Vec<{type_name(x.dtype)}, {x.size}> v{x.access.number}{rows}{vectors};"

    def _loads(self, v: Values, which: list[Vector]) -> list[str]:
        """Loads of vectors, before anything waits for one of them."""
        return self._each_vector(
            [f"    {v.name_of(x)}.load({v.place(x.access)});" for x in which] if which else []
        )

    def _each_vector(self, lines: list[str]) -> list[str]:
        if not self.by_row or not lines:
            return lines
        if any("base" in line for line in lines):
            lines = [f"    const unsigned base = first + k * {self.apart};", *lines]
        return [
            "#pragma unroll",
            "  for (int k = 0; k < S::K; k++) if (S::inside(k)) {",
            *lines,
            "  }",
        ]

    def _held(self, v: Values) -> dict[Any, None]:
        """Values along the row that sums are made of and a later level reads again: they stay in
        registers. What no sum is made of is computed where it is used."""
        summed = [s.x for s in self.statistics]
        held = {e: None for e in summed if v.depends(e) and not _is_vector(v, e)}
        parts = set(inside(summed))

        def look(e: Any, level: int) -> None:
            if isinstance(e, Statistics | Load):
                return
            if e in parts and v.level(e) < level and v.depends(e):
                held[e] = None
                return
            for i in operands(e):
                look(i, level)

        for e in (*(value for _, value in self.stores), *summed):
            look(e, v.level(e))
        if any(e.dtype == torch.float64 for e in held):
            raise Unsupported("sums of float64")
        return {e: None for e in held if not isinstance(e, Statistics)}

    def _loop(self, v: Values, level: int, ready: list[Statistics]) -> list[str]:
        """Everything of one level: what sums are made of, and what is stored."""
        wanted = [e for e in v.held if v.level(e) == level]
        done = [(s, value) for s, value in self.stores if v.level(value) == level]
        v.begin(level)
        for s in ready:
            # named outside of the loop, for `_measured`
            if s.x not in v.held:
                v.floats(s.x)
            if s.factor is not None:
                v.floats(s.factor)
        for e in wanted:
            v.hold(e)
        for store, value in done:
            self._stored(v, store, value)
        arrays = []
        for e in wanted:
            kind, count = v.array_type(e)
            arrays.append(f"  {kind} {v.array(e)}[S::K][{count}];")
        eight = [store for store, _ in done if store.eight]
        arrays += [f"  Vec<{type_name(s.dtype)}, {self.V}> {_row(s)}[S::K];" for s in eight]
        inner = self._each_vector([f"    {line}" for line in v.inner])
        quantised = [line for store in eight for line in self._quantised(store)]
        return [*(f"  {line}" for line in v.scalars), *arrays, *inner, *quantised]

    def _measured(self, v: Values, s: Statistics) -> list[str]:
        """The statistics of a row, from the values that its threads hold."""
        order = self.orders[s]
        name = v.names.setdefault(s, f"sum{len(v.names)}")
        get = f"[&](int k, int i) {{ return {v.element(s.x)}; }}"
        scratch = scratch_name(order)
        if s.op in NORM_GRADIENTS.values():
            factor = "1.f" if s.factor is None else v.floats(s.factor)[0]
            total = f"{order}::template of<S>({get}, {factor}, {scratch})"
            if not self.exact:
                total = f"{factor} * {order}::template of<S>({get}, {scratch})"
            return [f"  const float {name} = {total};"]
        total = f"{order}::template of<S>({get}, {scratch})"
        if s.op is aten.sum.dim_IntList:
            return [f"  const float {name} = {total};"]
        if s.op is aten.mean.dim:
            factor = float_literal(self.order.factor())
            return [f"  const float {name} = __fmul_rn({total}, {factor});"]
        eps = s.args[0]
        if eps is None:
            raise Unsupported("a norm without an eps")
        given = f"{get}, {float_literal(eps)}, 0.f, {scratch}"
        return [f"  {order} {name};", f"  {name}.template measure<S>({given});"]

    def _stored(self, v: Values, store: Store, value: Lowered) -> None:
        paired = value.dtype == store.dtype and v.is_paired(value)
        parts = v.pairs(value) if paired else v.floats(value)
        if store.dtype not in TYPES and store.dtype != torch.bool:
            raise Unsupported(f"results of {store.dtype}")
        access, places = self.layout.address(
            store.target, self.tensors[store.target].strides, store.index, store.dtype
        )
        kind, place = type_name(store.dtype), v.place(access)
        whole = store.dtype in TYPES
        if self.by_row and not v.depends(value) and not access.dynamic and len(set(places)) == 1:
            # one value a row, of which all threads have the same
            text = f"narrow<{kind}>({v.floats(value)[0]})" if whole else f"{parts[0]} != 0.f"
            once = "if (live && k == 0 && S::thread() == 0)"
            v.inner.append(f"{once} *({place} + {places[0]}) = {text};")
            return
        dense = whole and places == list(range(self.V)) and self.V > 1
        if dense and self.layout.is_aligned(access):
            name = f"o{access.number}"
            v.inner.append(f"Vec<{kind}, {self.V}> {name};")
            for i in range(0, self.V, 2):
                both = (
                    f"word({i}) = {parts[i // 2]}"
                    if paired
                    else (f"set({i}, {parts[i]}, {parts[i + 1]})")
                )
                v.inner.append(f"{name}.{both};")
            lines = [f"{name}.store_whole({place});"]
            v.inner += [f"{_row(store)}[k] = {name};"] if store.eight else []
        elif store.eight:
            raise Unsupported("eight-bit rows of elements with gaps")
        else:
            lines = []
            for lane, at in zip(v.floats(value), places, strict=True):
                text = f"narrow<{kind}>({lane})" if whole else f"{lane} != 0.f"
                lines.append(f"*({place} + {at}) = {text};")
        # where rows are not shared, threads beyond the last row have returned already
        v.inner += ["if (live) {", *lines, "}"] if self.by_row else lines

    def _quantised(self, store: Store) -> list[str]:
        """Stores a row again, in eight bits: the threads hold it as it was rounded."""
        places = (store.index, (*store.index[:-1], Affine()))
        pointers = []
        for (name, shape, dtype), at in zip(EightBitRows.of(store).parts(), places, strict=True):
            access, _ = self.layout.address(name, contiguous_strides(shape), at, dtype)
            pointers.append(first_row(self, access))
        row = _row(store)
        return [
            f"  __shared__ float largest_{row}[{-(-self.block // 32)}];",
            f"  write_eight<S>([&](int k, int i) {{ return {row}[k].get(i); }}, live, "
            f"{', '.join(pointers)}, largest_{row});",
        ]


def _row(store: Store) -> str:
    """What a thread holds of a row that is stored in eight bits, too."""
    return f"row_of_{store.target}"


def _is_vector(v: Values, e: Any) -> bool:
    return isinstance(e, Load) and v.vector(e) is not None
