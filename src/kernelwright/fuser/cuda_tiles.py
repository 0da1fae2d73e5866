"""CUDA C++ of programs that read a tensor across what they store, tile by tile.

Of such a tensor, neighbours lie along another variable (`near`) than those of the results (`far`):
threads that walk along the results would touch a sector of memory for each element. So a block
reads a tile as it lies, keeps it in shared memory, and computes along the results from there. In
SANA's linear attention two programs cast and transpose query and value, and one divides and
transposes back: 30 to 35 us each by rows on an H200, where their bytes take 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..backends.cuda import TYPES
from .cuda_kernel import ENTRY, Kernel, Tensor
from .cuda_rows import include_lines
from .cuda_source import Emitter
from .cuda_steps import computed_type, type_name
from .cuda_values import Values, Vector
from .expression import Load, walk
from .index import Affine, position
from .lowering import COMPLEX, Shape, inside
from .program import Program
from .row_layout import Access

THREADS = 256
# elements of a tile each way, at most and at least: with fewer, an access is less than two sectors
# of memory in half precision. Not tuned
LARGE, SMALL = 64, 32
# bytes that tiles may have for each element, so that several blocks share a multiprocessor
DEEP = 8


def kernel(program: Program, tensors: Mapping[str, Tensor], exact: bool = True) -> Kernel | None:
    """The kernel of a program whose tensors lie so; None if it is not to be run by tiles."""
    found = directions(program, tensors)
    if found is None:
        return None
    tiles = _Tiles(program, tensors, exact, *found)
    return tiles.made() if tiles.across else None


def directions(program: Program, tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The variables along which neighbours lie in what a program reads across, and in what it
    stores; None if it reads nothing across, sums along rows or writes over what it reads."""
    if program.rows or any(s.eight or s.target in program.loads for s in program.stores):
        return None
    loads = [e for e in walk(*(s.value for s in program.stores)) if isinstance(e, Load)]
    if COMPLEX.keys() & {*(e.dtype for e in loads), *(s.dtype for s in program.stores)}:
        return None
    extents = dict(program.extents)
    places = [position(s.index, tensors[s.target].strides) for s in program.stores]
    stored = {_neighbours(at, extents) for at in places}
    far = stored.pop()
    if far is None or stored:
        return None
    steps = {e: dict(_at(e, tensors).terms) for e in loads}
    across = [e for e, at in steps.items() if at.get(far, 0) not in (0, 1)]
    read = {_neighbours(_at(e, tensors), extents) for e in across}
    near = read.pop() if read else None
    deep = sum(e.dtype.itemsize for e in across)
    if near is None or read or deep > DEEP or any(e.dtype not in TYPES for e in across):
        return None
    return (near, far) if min(extents[near], extents[far]) >= SMALL else None


def _at(load: Load, tensors: Mapping[str, Tensor]) -> Affine:
    return position(load.index, tensors[load.source].strides)


def _neighbours(at: Affine, extents: Mapping[str, int]) -> str | None:
    """The variable along which elements lie next to each other."""
    return next((n for n, step in at.terms if step == 1 and extents[n] > 1), None)


@dataclass
class _TileValues(Values):
    """Values of which some are read from tiles: `staged` has the names of those."""

    staged: Mapping[Load, str] = field(default_factory=dict)

    def vector(self, e: Load) -> Vector | None:
        return None if e in self.staged else super().vector(e)

    def _loaded(self, e: Load) -> list[str]:
        if e not in self.staged:
            return super()._loaded(e)
        texts = (f"widen({self.staged[e]}[at][column + {lane}])" for lane in range(self.V))
        return [self._named(self.inner, text, computed_type(e.dtype)) for text in texts]


@dataclass
class _Tiles(Emitter):
    """Writes the kernel of a program, tile by tile."""

    near: str
    far: str

    def __post_init__(self) -> None:
        super().__post_init__()
        loads = [e for e in inside([v for _, v in self.stores]) if isinstance(e, Load)]
        # those that differ both ways; what differs one way only is read where it is needed
        self.across = [e for e in loads if self._is_across(e)]
        self.wide, self.high = (
            LARGE if self.extents[n] >= LARGE else SMALL for n in (self.far, self.near)
        )

    def _is_across(self, e: Load) -> bool:
        at = dict(_at(e, self.tensors).terms)
        return at.get(self.near) == 1 and at.get(self.far, 0) not in (0, 1)

    def _shape(self) -> Shape:
        others = (n for n in self.extents if n not in (self.near, self.far))
        return Shape((*others, self.near), (self.far,))

    def _vector(self, size: int) -> int:
        return 1 if self.extents[self.far] % 2 else 2

    def _tables(self) -> dict[str, str]:
        return {}

    def made(self) -> Kernel:
        vectors = self._computed(frozenset()).vectors
        values = self._computed(frozenset(vectors))  # each is loaded where it is used
        pointers = sorted(self.layout.accesses.values(), key=lambda a: a.number)
        rows = self.shape.rows
        steps = [dict(_at(e, self.tensors).terms)[self.far] for e in self.across]
        tiles = [-(-self.extents[self.near] // self.high), -(-self.extents[self.far] // self.wide)]
        code = [
            *include_lines(self),
            "template <class T> struct alignas(2 * sizeof(T)) Two { T a, b; };",
            f"struct Args {{ void* at[{len(pointers)}]; i64 strides[{len(pointers)}][{len(rows)}]; "
            f"i64 steps[{len(steps)}]; unsigned extents[{len(rows) + 1}]; }};",
            f'extern "C" __global__ void __launch_bounds__({THREADS})',
            f"{ENTRY}(const __grid_constant__ Args a) {{",
            *self._tile_of_block(pointers),
            *(line for i, e in enumerate(self.across) for line in self._staged(i, e)),
            "  __syncthreads();",
            *self._along_results(values, pointers),
            "}",
            "",
        ]
        return Kernel(
            "\n".join(code),
            block=THREADS,
            row_threads=THREADS,
            pointers=[(a.name, a.constant) for a in pointers],
            extents=[*(self.extents[n] for n in rows[:-1]), *tiles],
            numbers=[
                *(s for a in pointers for s in a.strides),
                *steps,
                *(self.extents[n] for n in (*rows, self.far)),
            ],
            layout=f"{len(pointers) * len(rows) + len(steps)}q{len(rows) + 1}I",
            alignment=self.V,
        )

    def _computed(self, late: frozenset[int]) -> _TileValues:
        values = _TileValues(
            **self._of_values(late),
            vector_index="",
            staged={e: f"tile{i}" for i, e in enumerate(self.across)},
        )
        values.begin(0)
        for store, value in self.stores:
            self._stored(values, store, value)
        return values

    def _tile_of_block(self, pointers: list[Access]) -> list[str]:
        """Which tile a block has: where it begins, and all other variables."""
        rows = self.shape.rows
        height, width = len(rows) - 1, len(rows)
        lines = ["  unsigned number = blockIdx.x;"]
        for name, i, size in (("left", width, self.wide), ("top", height, self.high)):
            count = f"(a.extents[{i}] + {size - 1}) / {size}"
            lines.append(f"  const unsigned {name} = number % ({count}) * {size};")
            lines.append(f"  number /= {count};")
        for i, name in reversed(list(enumerate(rows[:-1]))):
            lines.append(f"  const unsigned {name} = number % a.extents[{i}];")
            lines.append(f"  number /= a.extents[{i}];")
        for a in pointers:
            moved = "".join(
                f" + {name} * a.strides[{a.number}][{i}]"
                for i, name in enumerate(rows[:-1])
                if a.strides[i]
            )
            kind = type_name(a.dtype)
            lines.append(f"  {kind}* const begin{a.number} = ({kind}*)a.at[{a.number}]{moved};")
        return lines

    def _staged(self, number: int, e: Load) -> list[str]:
        """Reads a tile as it lies, all of a thread's part before the first is written."""
        access, lanes = self.layout.address(
            e.source, self.tensors[e.source].strides, e.index, e.dtype
        )
        first, step = lanes[0], dict(_at(e, self.tensors).terms)[self.far]
        even = (first, step, self.extents[self.near], *access.strides[:-1])
        pair = self.V == 2 and all(n % 2 == 0 for n in even)
        kind, tile, each = type_name(e.dtype), f"tile{number}", 2 if pair else 1
        turns = self.high * self.wide // each // THREADS
        height, width = len(self.shape.rows) - 1, len(self.shape.rows)
        part = [
            "#pragma unroll",
            f"    for (unsigned k = 0; k < {turns}; k++) {{",
            f"      const unsigned n = threadIdx.x + k * {THREADS};",
            f"      const unsigned x = n % {self.high // each} * {each};",
            f"      const unsigned y = n / {self.high // each};",
            f"      if (top + x < a.extents[{height}] && left + y < a.extents[{width}])",
        ]
        held = f"Two<{kind}>" if pair else kind
        written = f"{tile}[x][y] = read[k]" + (".a" if pair else "")
        written += f", {tile}[x + 1][y] = read[k].b;" if pair else ";"
        return [
            f"  __shared__ {kind} {tile}[{self.high}][{_pitch(self.wide, e.dtype)}];",
            "  {",
            f"    const {kind}* const from = begin{access.number} + top + left * a.steps[{number}]"
            f" + {first};",
            f"    {held} read[{turns}];",
            *part,
            f"        read[k] = *(const {held}*)(from + y * a.steps[{number}] + x);",
            "    }",
            *part,
            f"        {written}",
            "    }",
            "  }",
        ]

    def _along_results(self, values: _TileValues, pointers: list[Access]) -> list[str]:
        near, threads = len(self.shape.rows) - 1, self.wide // self.V
        rows = THREADS // threads
        lines = [
            f"  const unsigned column = threadIdx.x % {threads} * {self.V};",
            "  const unsigned first = left + column;",
            f"  if (first >= a.extents[{near + 1}]) return;",
            "#pragma unroll 4",
            f"  for (unsigned at = threadIdx.x / {threads}; at < {self.high}; at += {rows}) {{",
            f"    const unsigned {self.near} = top + at;",
            f"    if ({self.near} >= a.extents[{near}]) return;",
        ]
        for a in pointers:
            moved = f" + {self.near} * a.strides[{a.number}][{near}]" if a.strides[near] else ""
            kind = type_name(a.dtype)
            lines.append(f"    {kind}* const p{a.number} = begin{a.number}{moved};")
        inner = [*values.scalars, *values.inner]
        return [*lines, *(f"    {line}" for line in inner), "  }"]


def _pitch(width: int, dtype: torch.dtype) -> int:
    """Elements from one row of a tile to the next: one word more than a row, so that elements of a
    column are in different banks."""
    return width + max(1, 4 // dtype.itemsize)
