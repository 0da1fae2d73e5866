"""Typed access to the JSON of a result file."""

from __future__ import annotations

import math
from typing import Any


class Unreadable(ValueError):
    """A path without results that this version can read; the message says what to do."""


class Values:
    """One JSON object of a file; errors about its values start with `where`."""

    def __init__(self, where: str, values: Any) -> None:
        self.where = where
        self.values = values if isinstance(values, dict) else {}

    def text(self, name: str) -> str:
        return self._take(name, str, "a text")

    def flag(self, name: str) -> bool:
        return self._take(name, bool, "true or false")

    def count(self, name: str) -> int:
        return self._take(name, int, "a whole number")

    def time(self, name: str) -> float:
        return _positive(self.values.get(name), f"{self.where}: {name!r}")

    def maybe(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Unreadable(f"{self.where}: {name!r} is {value!r}, not a number; measure again")
        return float(value)

    def times(self, name: str, zero: bool = False) -> dict[str, float]:
        where = f"{self.where}: {name!r} of"
        return {k: _positive(v, f"{where} {k}", zero) for k, v in self.table(name).items()}

    def maybe_times(self, name: str) -> dict[str, float]:
        return self.times(name, zero=True) if name in self.values else {}

    def table(self, name: str) -> dict[str, Any]:
        return self._take(name, dict, "a table")

    def rows(self, name: str) -> list[Values]:
        listed = self._take(name, list, "a list")
        return [Values(f"{self.where}: {name!r} {n}", row) for n, row in enumerate(listed, 1)]

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(map(str, self.values.get(name) or ()))

    def _take(self, name: str, kind: Any, meaning: str) -> Any:
        value = self.values.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise Unreadable(f"{self.where}: {name!r} is {value!r}, not {meaning}; measure again")
        return value


def _positive(value: Any, where: str, zero: bool = False) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise Unreadable(f"{where} is {value!r}, not a positive number; measure again")
    return float(value)
