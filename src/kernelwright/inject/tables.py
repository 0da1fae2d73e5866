"""Rotary tables that depend on nothing but numbers: made once, and kept narrow for the kernels.

A model makes its tables anew at every step, from the size of the picture alone. They are kept by
those numbers, so they cannot go stale; one that somebody has written to since is made again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .graphs.capture import capturing, keep

LIMIT = 8  # tables of so many sizes are kept
Rotary = tuple[Tensor, Tensor]


@dataclass
class _Entry:
    tables: Rotary
    versions: tuple[int, int]
    narrow: Rotary | None

    @property
    def untouched(self) -> bool:
        return self.versions == _versions(self.tables)


@dataclass
class Tables:
    """The tables of one injection."""

    _by_numbers: OrderedDict[Hashable, _Entry] = field(default_factory=OrderedDict)

    def __deepcopy__(self, memo: Any) -> Tables:
        return Tables()

    def remembered(self, numbers: Hashable, make: Callable[[], Rotary]) -> Rotary:
        """cos and sin [batch, tokens, width] as `make` makes them from these numbers."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return make()  # tensors of inference mode do not count who writes to them
        entry = self._by_numbers.get(numbers)
        if entry is not None and entry.untouched:
            self._by_numbers.move_to_end(numbers)
            return keep(entry.tables)
        tables = make()
        if not capturing():
            self._by_numbers[numbers] = _Entry(tables, _versions(tables), _narrowed(tables))
            if len(self._by_numbers) > LIMIT:
                self._by_numbers.popitem(last=False)
        return tables

    def narrow(self, tables: Rotary | None) -> Rotary | None:
        """The same tables as [tokens, width / 2], a quarter or less to read, if they are ours and
        hold everything twice."""
        if tables is None or torch.compiler.is_compiling():
            return tables
        for entry in self._by_numbers.values():
            if entry.tables[0] is tables[0] and entry.tables[1] is tables[1]:
                if entry.narrow is None or not entry.untouched:
                    return tables
                return keep(entry.narrow)
        return tables


def _versions(tables: Rotary) -> tuple[int, int]:
    return tables[0]._version, tables[1]._version


def _narrowed(tables: Rotary) -> Rotary | None:
    """One column for each pair and one table for the whole batch, if that says the same."""
    narrow = []
    for table in tables:
        first = table[0, :, ::2]
        if table.ndim != 3 or not torch.equal(
            table, first.repeat_interleave(2, -1).expand_as(table)
        ):
            return None
        narrow.append(first.contiguous())
    return narrow[0], narrow[1]
