"""Cached rotary tables, and a narrow copy of them for the kernels.

A model computes its tables at every step, from the size of the picture alone. They are cached by
those numbers and by the state of their module; a table that was written to is computed again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...ops import library
from ...ops.qk_norm_rope import QK_NORM_ROPE
from ..graphs.capture import capturing, keep
from ..graphs.host_reads import reading
from ..runtime.sites import mode

LIMIT = 8  # sizes whose tables are cached
Rotary = tuple[Tensor, Tensor]


@dataclass(eq=False)
class _Entry:
    tables: Rotary
    versions: tuple[int, int]
    switches: list[Any]  # of PyTorch, as they were
    looked: bool = False  # whether the columns were compared
    _narrow: Rotary | None = None

    @property
    def untouched(self) -> bool:
        return self.versions == _versions(self.tables)

    def narrow(self) -> Rotary | None:
        """The narrow copy, made for the first kernel that asks: programs read the tables."""
        if not self.looked and not (capturing() or reading()):  # values are read on the host
            self._narrow, self.looked = _narrowed(self.tables), True
        return self._narrow


# every cached table by the id of its cos, which the entry keeps alive
_kept: WeakValueDictionary[int, _Entry] = WeakValueDictionary()


@dataclass
class Tables:
    """The cached tables of one injection."""

    _by_numbers: OrderedDict[Hashable, _Entry] = field(default_factory=OrderedDict)
    _lock: Any = field(default_factory=threading.Lock)

    def __deepcopy__(self, memo: Any) -> Tables:
        return Tables()

    def cached(self, numbers: Hashable, make: Callable[[], Rotary]) -> Rotary:
        """cos and sin [batch, tokens, width]: `make()`, which depends on these numbers alone."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return make()  # inference tensors have no version counter
        if mode.cache_scope is None:
            return make()
        serial, (signature, *switches) = mode.cache_scope
        key = numbers, serial, signature  # tables made under other switches give way to these
        with self._lock:
            entry = self._by_numbers.get(key)
            if entry is not None and entry.switches == switches and entry.untouched:
                self._by_numbers.move_to_end(key)
                return keep(entry.tables)
        tables = make()
        if not capturing() and not any(t.requires_grad or t.is_meta for t in tables):
            entry = _Entry(tables, _versions(tables), switches)
            with self._lock:
                self._by_numbers[key] = _kept[id(tables[0])] = entry
                if len(self._by_numbers) > LIMIT:
                    self._by_numbers.popitem(last=False)
        return tables


def narrow(tables: Rotary | None) -> Rotary | None:
    """Cached tables as [tokens, width / 2], a quarter or less to read; unchanged if they are not
    cached, or their columns do not come in equal pairs."""
    if tables is None or torch.compiler.is_compiling():
        return tables
    cos, sin = tables
    entry = _kept.get(id(cos))
    if entry is None or entry.tables[0] is not cos or entry.tables[1] is not sin:
        return tables
    if not entry.untouched or (found := entry.narrow()) is None:
        return tables
    return keep(found)


def _versions(tables: Rotary) -> tuple[int, int]:
    return tables[0]._version, tables[1]._version


def _narrowed(tables: Rotary) -> Rotary | None:
    """One column for each pair and one table for the batch; None if columns or samples differ."""
    narrow = []
    for table in tables:
        first = table[0, :, ::2]
        if table.ndim != 3 or not torch.equal(
            table, first.repeat_interleave(2, -1).expand_as(table)
        ):
            return None
        narrow.append(first.contiguous())
    return narrow[0], narrow[1]


def _qk_norm_rope_kept(*operands: Any) -> tuple[Tensor, Tensor]:
    query, key, q_weight, k_weight, cos, sin, eps, across_heads, layout, exact, backend = operands
    cos, sin = narrow((cos, sin)) or (cos, sin)
    row = query, key, q_weight, k_weight, cos, sin, eps, across_heads, layout
    return QK_NORM_ROPE(*row, exact=exact or None, backend=backend or None)


# `qk_norm_rope` for torch.compile, which looks up the narrow tables when it runs
QK_NORM_ROPE_KEPT = library.define_unrecorded(
    "qk_norm_rope_kept",
    "(Tensor query, Tensor key, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, "
    "float eps, bool across_heads, str layout, str exact, str backend) -> (Tensor, Tensor)",
    _qk_norm_rope_kept,
    QK_NORM_ROPE.library_op,
)
