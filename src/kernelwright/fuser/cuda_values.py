"""C++ of the values of expressions: floats, one for each lane, or pairs of 16-bit numbers.

For PyTorch's bits each step is rounded to its dtype. A sum or product of 16-bit numbers is made in
pairs, by one instruction; what is computed in float32 becomes a pair where pairs or a store read
it, which rounds both at once, and is rounded by itself where floats do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from ..backends import Unsupported
from ..backends.cuda import TYPES
from .cuda_steps import (
    HALVES,
    computed_type,
    form_of_table,
    is_exact,
    is_rounding,
    normed,
    number,
    pairs_of,
    rounded,
    step_maker,
    type_name,
)
from .expression import Choice, Load, Step
from .lowering import Lowered, Normed, Shape, Statistics, operands
from .row_layout import Access, RowLayout


@dataclass(frozen=True)
class Vector:
    """A load of neighbours: where they are, how many, and which of them each lane takes."""

    access: Access
    lanes: tuple[int, ...]
    dtype: torch.dtype
    size: int


@dataclass
class Values:
    """The code of one level of a kernel: `scalars` once a row, `inner` for each vector."""

    exact: bool
    V: int
    shape: Shape
    layout: RowLayout
    strides: dict[str, tuple[int, ...]]
    # vectors that are loaded where they are used, and not before everything else
    late: frozenset[int] = frozenset()
    # how the vectors of a thread are told apart, and those of its rows for accesses that differ
    vector_index: str = "[k]"
    row_index: Callable[[Access], str] = lambda _: ""
    # names of tables by what they are made with
    tables: Mapping[str, str] = field(default_factory=dict)
    # what is rounded even where nothing else is: see `Emitter._rounded`
    rounds: frozenset[Any] = frozenset()
    # values along the row that stay in registers
    held: dict[Any, None] = field(default_factory=dict)
    names: dict[Any, str] = field(default_factory=dict)
    # vectors that are loaded first, in the order of their use, and at which level that is
    vectors: dict[int, tuple[Vector, int]] = field(default_factory=dict)
    _known: dict[Any, bool] = field(default_factory=dict)
    _levels: dict[Any, int] = field(default_factory=dict)
    _numbers: Any = field(default_factory=count)

    # what an expression depends on

    def depends(self, e: Any) -> bool:
        """Whether it differs along a row."""
        if e not in self._known:
            self._known[e] = self._find_depends(e)
        return self._known[e]

    def _find_depends(self, e: Any) -> bool:
        if isinstance(e, Statistics):
            return False
        if isinstance(e, Load):
            return any(n in self.shape.along for i in e.index for n in i.names)
        if isinstance(e, Choice) and e.name in self.shape.along:
            return True
        return any(map(self.depends, operands(e)))

    def level(self, e: Any) -> int:
        """How many sums along the row have to be made before it."""
        if e not in self._levels:
            below = max(map(self.level, operands(e)), default=0)
            self._levels[e] = below + isinstance(e, Statistics)
        return self._levels[e]

    # one level after the other

    def begin(self, level: int) -> None:
        self.now = level
        self.scalars: list[str] = []
        self.inner: list[str] = []
        self._floats: dict[Any, list[str]] = {}
        self._pairs: dict[Any, list[str]] = {}
        self._raw: dict[Any, list[str]] = {}
        self._texts: dict[str, str] = {}
        self._here: set[int] = set()

    def array(self, e: Any) -> str:
        return self.names.setdefault(e, f"held{len(self.names)}")

    def array_type(self, e: Any) -> tuple[str, int]:
        """The type of the elements that a held value is kept in, and how many a vector has."""
        return ("unsigned", self.V // 2) if self.is_paired(e) else ("float", self.V)

    def hold(self, e: Any) -> None:
        values = self.pairs(e) if self.is_paired(e) else self.floats(e)
        for i, value in enumerate(values):
            self.inner.append(f"{self.array(e)}{self.vector_index}[{i}] = {value};")

    def element(self, e: Any) -> str:
        """Element i of vector k of a value that is held, or loaded first; or the value itself, if
        it is the same along the row."""
        if not self.depends(e):
            return self.floats(e)[0]
        if isinstance(e, Load) and e not in self.held:
            vector = self.vector(e)
            assert vector is not None
            return f"{self.name_of(vector)}.get(i)"
        array = f"{self.array(e)}[k]"
        return (
            f"of_pair<{type_name(e.dtype)}>({array}[i / 2], i % 2)"
            if self.is_paired(e)
            else (f"{array}[i]")
        )

    def is_paired(self, e: Any) -> bool:
        """Whether its values are kept as pairs."""
        return self.exact and self.V % 2 == 0 and e.dtype in HALVES and self.depends(e)

    # floats

    def floats(self, e: Any) -> list[str]:
        """The names of the values of an expression, one for each lane."""
        if e not in self._floats:
            self._floats[e] = self._find_floats(e)
        return self._floats[e]

    def _find_floats(self, e: Any) -> list[str]:
        if isinstance(e, Statistics):
            return [self.names[e]] * self.V
        if isinstance(e, Load):
            return self._loaded(e)
        # a sign costs nothing on floats
        of_pairs = self._is_of_pairs(e) and not is_exact(e)
        if e in self._pairs or self._is_held(e) or of_pairs:
            if not self.is_paired(e):
                return [f"{self.array(e)}{self.vector_index}[{i}]" for i in range(self.V)]
            kind, pairs = type_name(e.dtype), self.pairs(e)
            texts = [f"of_pair<{kind}>({pairs[i // 2]}, {i % 2})" for i in range(self.V)]
            return [self._named(self.inner, text, "float") for text in texts]
        if isinstance(e, Choice):
            return self._chosen(e, [self.floats(p) for p in e.pieces], "float")
        raw = self.raw(e)
        if is_exact(e) or not (self.exact or e in self.rounds or is_rounding(e)):
            return raw
        into = self.inner if self.depends(e) else self.scalars
        kind = computed_type(e.dtype)
        return [self._named(into, rounded(text, e.dtype), kind) for text in raw]

    def raw(self, e: Any) -> list[str]:
        """The values of a step before they are rounded to its dtype."""
        if e not in self._raw:
            self._raw[e] = self._find_raw(e)
        return self._raw[e]

    def _find_raw(self, e: Any) -> list[str]:
        if isinstance(e, Normed):
            given = [self.floats(e.x)]
            given += [self.floats(s) if s is not None else [""] * self.V for s in e.scales]
            of = self.names[e.of]
            lines = [normed(of, [g[i] for g in given], self.exact) for i in range(self.V)]
        else:
            args = [
                self.floats(a) if isinstance(a, Lowered) else [number(a)] * self.V for a in e.args
            ]
            types = [a.dtype if isinstance(a, Lowered) else None for a in e.args]
            if table := self.tables.get(form_of_table(e) or ""):
                lines = [f"{table}.of({x})" for x in args[0]]
            else:
                make = step_maker(e, types, self.exact)
                lines = [make([a[i] for a in args]) for i in range(self.V)]
        kind = computed_type(e.dtype)
        if not self.depends(e):
            return [self._named(self.scalars, lines[0], kind)] * self.V
        return [self._named(self.inner, line, kind) for line in lines]

    def _named(self, into: list[str], text: str, kind: str) -> str:
        """A name for a value; the same one if it was computed before."""
        if text.isidentifier():
            return text
        if text not in self._texts:
            name = self._texts[text] = f"e{next(self._numbers)}"
            into.append(f"const {kind} {name} = {text};")
        return self._texts[text]

    def _is_held(self, e: Any) -> bool:
        return e in self.held and self.level(e) < self.now

    # pairs

    def pairs(self, e: Any) -> list[str]:
        """The values of a 16-bit expression, two in a word."""
        if e not in self._pairs:
            self._pairs[e] = self._find_pairs(e)
        return self._pairs[e]

    def _is_of_pairs(self, e: Any) -> bool:
        """Whether it is computed in pairs."""
        return self.is_paired(e) and isinstance(e, Step) and pairs_of(e) is not None

    def _find_pairs(self, e: Any) -> list[str]:
        half = range(self.V // 2)
        if not self.depends(e):
            one = self.floats(e)[0]
            text = f"pair<{type_name(e.dtype)}>({one}, {one})"
            return [self._named(self.scalars, text, "unsigned")] * len(half)
        if self._is_held(e):
            return [f"{self.array(e)}{self.vector_index}[{i}]" for i in half]
        if isinstance(e, Load) and (vector := self.vector(e)):
            return self._loaded_pairs(vector)
        if isinstance(e, Choice):
            return self._chosen(e, [self.pairs(p) for p in e.pieces], "unsigned")
        if self._is_of_pairs(e):
            make = pairs_of(e)
            assert make is not None
            args = [
                self.pairs(a) if isinstance(a, Lowered) else [self._pair_of(a, e.dtype)] * len(half)
                for a in e.args
            ]
            return [self._named(self.inner, make(*(a[i] for a in args)), "unsigned") for i in half]
        of = self.floats(e) if isinstance(e, Load) or e in self._floats else self.raw(e)
        kind = type_name(e.dtype)
        texts = [f"pair<{kind}>({of[2 * i]}, {of[2 * i + 1]})" for i in half]
        return [self._named(self.inner, text, "unsigned") for text in texts]

    def _pair_of(self, value: Any, dtype: torch.dtype) -> str:
        """A number twice in a word."""
        bits = int(torch.tensor(float(value), dtype=dtype).view(torch.int16).item()) & 0xFFFF
        return f"{bits * 0x10001:#010x}u"

    def _loaded_pairs(self, vector: Vector) -> list[str]:
        name, found = self._vector_name(vector), []
        for low, high in zip(vector.lanes[::2], vector.lanes[1::2], strict=True):
            if low % 2 == 0 and high == low + 1:
                found.append(f"{name}.word({low})")
                continue
            words = f"{name}.word({low // 2 * 2}), {low % 2}, {name}.word({high // 2 * 2})"
            found.append(self._named(self.inner, f"halves({words}, {high % 2})", "unsigned"))
        return found

    # choices

    def _chosen(self, e: Choice, pieces: list[list[str]], kind: str) -> list[str]:
        """The values of a choice, floats or pairs, of those of its pieces."""
        size = len(pieces[0])
        each = self.V // size  # lanes in a value
        if e.name in self.shape.along and not self.layout.rest[e.name]:
            lane = self.layout.lane[e.name]
            found = []
            for i in range(size):
                first, last = lane[i * each], lane[i * each + each - 1]
                if first == last:
                    found.append(pieces[first][i])
                    continue
                text = f"halves({pieces[first][i]}, 0, {pieces[last][i]}, 1)"
                found.append(self._named(self.inner, text, kind))
            return found
        if e.name in self.shape.along and any(self.layout.lane[e.name]):
            raise Unsupported("a choice inside a vector")
        value = e.name if e.name in self.shape.rows else f"({self.layout.value(e.name)})"
        lines = []
        for i in range(size):
            text = pieces[-1][i]
            for k in reversed(range(len(pieces) - 1)):
                text = f"({value} == {k} ? {pieces[k][i]} : {text})"
            kind = computed_type(e.dtype) if kind == "float" else kind
            lines.append(self._named(self.inner, text, kind))
        return lines

    # loads

    def vector(self, e: Load) -> Vector | None:
        """The vector that a load along the row is part of, if it lies so."""
        access, lanes = self.layout.address(e.source, self.strides[e.source], e.index, e.dtype)
        size = self.layout.vector_size(access)
        if self.V == 1 or size is None or e.dtype not in TYPES:
            return None
        # of twice as many, every lane takes another one: they are not loaded for a few
        if len(set(lanes)) < (2 if size == self.V else self.V) or not self.layout.is_aligned(
            access
        ):
            return None
        return Vector(access, tuple(lanes), e.dtype, size)

    def _vector_name(self, vector: Vector) -> str:
        """A vector in registers; it is loaded with the others, or here for the first time."""
        number = vector.access.number
        level = min(self.now, self.vectors.get(number, (vector, self.now))[1])
        self.vectors[number] = vector, level
        name = self.name_of(vector)
        if number in self.late and number not in self._here:
            self._here.add(number)
            kind = f"Vec<{type_name(vector.dtype)}, {vector.size}>"
            self.inner.append(f"{kind} {name}; {name}.load({self.place(vector.access)});")
        return name

    def name_of(self, vector: Vector) -> str:
        number = vector.access.number
        if number in self.late:
            return f"v{number}"
        return f"v{number}{self.row_index(vector.access)}{self.vector_index}"

    def place(self, access: Access) -> str:
        """The address of a vector."""
        return f"p{access.number} + ({self.layout.offset(access)})"

    def _loaded(self, e: Load) -> list[str]:
        if vector := self.vector(e):
            name = self._vector_name(vector)
            return [f"{name}.get({lane})" for lane in vector.lanes]
        access, lanes = self.layout.address(e.source, self.strides[e.source], e.index, e.dtype)
        into = self.inner if access.dynamic or len(set(lanes)) > 1 else self.scalars
        kind, found = computed_type(e.dtype), []
        for lane in lanes:
            text = f"{self.place(access)} + {lane}"
            text = f"widen(*({text}))" if e.dtype in TYPES else f"{kind}(*({text}))"
            found.append(self._named(into, text, kind))
        return found
