"""How the threads of a kernel share the rows of a program, and what each of them loads when.

With sums, or eight-bit rows, whose largest element is needed, a row is shared by the threads of a
`Spread`, and a thread holds vectors of V neighbours; without, each thread has one vector of some
row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ..backends import Unsupported
from ..ops.fp8.cuda import row_threads
from ..ops.gelu.cuda import TABLE_BLOCK, TABLE_ELEMENTS
from ..ops.row.order import PLAIN_THREADS
from .cuda_kernel import Tensor
from .cuda_steps import form_of_table
from .cuda_values import Vector
from .eight_bit_rows import EightBitRows
from .expression import Choice, Load
from .index import Space
from .lowering import COMPLEX, Shape, Statistics, inside, lowered, statistics_of
from .program import Program
from .row_layout import Access, RowLayout, widest_vector
from .row_orders import Orders

# Registers of a thread that may hold what is loaded before the first sum. More of them leave room
# for fewer threads: with 64, FLUX.2's rows of 6144 take 64 registers and not 128. Not yet measured.
EARLY = 64
# The threads of a block at least, if they share rows.
ROW_BLOCK = 128
# How many heads of a token a thread takes, if they divide evenly: they share weights and tables of
# positions. For FLUX.2's query and key on sm_90, 1, 2 and 4 take 272, 237 and 217 instructions a
# head and 52, 64 and 94 registers. Not yet measured.
TOGETHER = (2,)


@dataclass
class RowSharing:
    """The blocks and threads of the kernel of a program whose tensors lie so; if `exact`, threads
    sum in ATen's order."""

    program: Program
    tensors: Mapping[str, Tensor]
    exact: bool

    def __post_init__(self) -> None:
        self.tensors = {name: t.as_real() for name, t in self.tensors.items()}
        self.extents = dict(self.program.extents)
        space = Space(self.extents)
        self.shape = self._shape()
        self.width = prod(self.extents[n] for n in self.shape.along)
        self.rows = prod(self.extents[n] for n in self.shape.rows)
        values = [lowered(s.value, space) for s in self.program.stores]
        if any(getattr(e, "dtype", None) in COMPLEX for e in inside(values)):
            raise Unsupported("complex numbers")  # left whole: only their parts have instructions
        self.stores = list(zip(self.program.stores, values, strict=True))
        self.statistics = statistics_of(values)
        self.eight = [EightBitRows.of(s) for s in self.program.stores if s.eight]
        # whether several threads share a row; otherwise each has one vector of it
        self.by_row = bool(self.statistics or self.eight)
        size = min((s.dtype.itemsize for s in self.program.stores), default=4)
        self.V = self._vector(size)
        self.threads = self.width // self.V
        self.orders: dict[Statistics, str] = {}
        if self.statistics:
            self.order = Orders(self.width, self.rows, self.V, self.exact)
            self.orders = {s: self.order.of(s).norm for s in self.statistics}
            self.threads, self.V = self.order.threads_of(self.statistics)
        elif self.eight:
            self.threads = row_threads(self.width, gated=len(self.program.loads) > 1)
        self.block = PLAIN_THREADS
        if self.by_row:
            self.block = max(ROW_BLOCK, self.threads)
            self.block -= self.block % self.threads
        self.tables = self._tables()
        if self.tables:
            self.block = TABLE_BLOCK
        self.apart = self.threads * self.V if self.by_row else 0
        self.per_thread = -(-self.width // self.apart) if self.by_row else 1
        self.layout = RowLayout(self.shape, self.extents, self.V, self.apart)
        for e in inside(values):  # loads before stores
            if isinstance(e, Load):
                self.layout.address(e.source, self.tensors[e.source].strides, e.index, e.dtype)
        # a variable of which a thread takes several rows
        self.by, self.together = "", 1

    def _shape(self) -> Shape:
        return Shape.of(self.program)

    def _vector(self, size: int) -> int:
        """How many neighbours a thread holds as one vector; `size` are the bytes of the smallest
        element that is stored."""
        return widest_vector(self.shape, self.extents, size)

    def take_several_rows(self, loaded: list[Access]) -> None:
        """Let a thread take several rows, where that saves loads of these."""
        self.by, self.together = self._several(loaded)

    @property
    def extents_of_rows(self) -> list[int]:
        """How many there are of each variable of the rows; of one, how many groups."""
        return [self.extents[n] // (self.together if n == self.by else 1) for n in self.shape.rows]

    def differs(self, access: Access) -> bool:
        """Whether the rows of a thread are at different places."""
        return bool(self.by and access.strides[self.shape.rows.index(self.by)])

    def late(self, vectors: Mapping[int, tuple[Vector, int]]) -> frozenset[int]:
        """Vectors that are loaded where they are used: those after the first sums, if all would
        take too many registers."""
        sizes = [v.size * v.dtype.itemsize // 4 * self.per_thread for v, _ in vectors.values()]
        later = [n for n, (_, level) in vectors.items() if level]
        return frozenset(later) if sum(sizes) > EARLY else frozenset()

    def _several(self, loaded: list[Access]) -> tuple[str, int]:
        """A variable of which a thread takes several rows, and how many: the one along which most
        tables of positions stay the same. Only where a row is one vector of few threads."""
        if not self.statistics or self.eight or self.per_thread > 1 or self.threads > 16:
            return "", 1
        best, most = "", 0
        chosen = {e.name for e in inside([v for _, v in self.stores]) if isinstance(e, Choice)}
        for i, name in enumerate(self.shape.rows):
            same = sum(any(a.strides) and not a.strides[i] for a in loaded)
            divides = any(self.extents[name] % n == 0 for n in TOGETHER)
            if same and same >= most and divides and name not in chosen:
                best, most = name, same
        if not best:
            return "", 1
        return best, next(n for n in TOGETHER if self.extents[best] % n == 0)

    def _tables(self) -> dict[str, str]:
        """Functions of bfloat16 that are looked up in a table, which a block computes once."""
        total = self.rows * self.width
        if self.by_row or not self.exact or not TABLE_ELEMENTS <= total < self.V << 30:
            return {}
        found = (form_of_table(e) for e in inside([v for _, v in self.stores]))
        return {form: f"table{i}" for i, form in enumerate(dict.fromkeys(filter(None, found)))}
