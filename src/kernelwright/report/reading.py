"""Reads result files: what is not one is refused in a line that says what to do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..bench.results import SCHEMA
from .rows import Environment, ExactRow, ModelRow, OpRow


class Unreadable(ValueError):
    """A path that holds no results this version can read: which, why, and what to do."""


@dataclass(frozen=True)
class Results:
    """One result file; the list that belongs to its kind is filled."""

    path: Path
    kind: str
    environment: Environment
    models: tuple[ModelRow, ...] = ()
    ops: tuple[OpRow, ...] = ()
    exact: tuple[ExactRow, ...] = ()


def read(paths: Iterable[Path]) -> list[Results]:
    """Every result file among `paths`; of a folder, all its .json files."""
    files: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found = sorted(path.rglob("*.json"))
            if not found:
                raise Unreadable(f"{path}: no .json file in this folder; give one that has results")
            files.update(dict.fromkeys(found))
        else:
            files[path] = None
    return [_read(path) for path in files]


def _read(path: Path) -> Results:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unreadable(f"{path}: no such file; `kernelwright bench` writes one") from None
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except ValueError as error:
        raise Unreadable(f"{path}: not JSON ({error}); give a result file") from None
    if not isinstance(content, dict) or "schema" not in content:
        raise Unreadable(f"{path}: names no schema, so it is no result file; give one")
    if content["schema"] != SCHEMA:
        raise Unreadable(
            f"{path}: schema {content['schema']!r}, this version reads {SCHEMA}; "
            "measure again, or use the version that wrote it"
        )
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise Unreadable(f"{path}: kind {kind!r} is unknown; known are {', '.join(KINDS)}")
    environment, rows = content.get("environment"), content.get("rows")
    if not isinstance(environment, dict):
        raise Unreadable(f"{path}: no environment, so no figure in it can be placed; measure again")
    if not isinstance(rows, list) or not rows:
        raise Unreadable(f"{path}: no rows; measure again")
    made = Environment(**{f.name: environment.get(f.name) for f in fields(Environment)})
    typed = tuple(KINDS[kind](_Row(f"{path}: row {n}", row)) for n, row in enumerate(rows, 1))
    return Results(path, kind, made, **{kind: typed})


class _Row:
    """Takes values out of one JSON row, each with the type it must have."""

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

    def table(self, name: str) -> dict[str, Any]:
        return self._take(name, dict, "a table")

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


def _model(row: _Row) -> ModelRow:
    values = row.values
    failed = row.text("failed") if "failed" in values else None
    sizes = row.table("sizes")
    problems = [p if isinstance(p, str) else _problem(p) for p in values.get("problems") or ()]
    split = row.times("split", zero=True) if values.get("split") else {}
    replaced = values.get("replaced")
    return ModelRow(
        model=row.text("model"),
        config=row.text("config"),
        sizes=tuple(sizes.items()),
        dtype=row.text("dtype"),
        tiny=row.flag("tiny"),
        ms=None if failed else row.time("ms"),
        failed=failed,
        equal=None if failed else row.flag("equal"),
        error=row.maybe("error"),
        first_s=row.maybe("first_s"),
        peak_gib=row.maybe("peak_gib"),
        replaced=None if replaced is None else row.count("replaced"),
        sites=values.get("sites") or {},
        problems=tuple(problems),
        graphs=tuple(values.get("graphs") or ()),
        split=split,
    )


def _problem(problem: dict[str, Any]) -> str:
    return f"{problem.get('module', '?')}: {problem.get('problem', '?')}"


def _op(row: _Row) -> OpRow:
    return OpRow(
        op=row.text("op"),
        case=row.text("case"),
        dtype=row.text("dtype"),
        chosen=row.text("chosen"),
        megabytes=row.time("megabytes"),
        copy_us=row.time("copy_us"),
        gpu_us=row.times("gpu_us"),
        host_us=row.times("host_us"),
    )


def _exact(row: _Row) -> ExactRow:
    covered = "not_covered" not in row.values
    return ExactRow(
        op=row.text("op"),
        chain=row.text("chain"),
        dtype=row.text("dtype"),
        width=row.count("width"),
        rows=row.count("rows"),
        elements=row.count("elements") if covered else 0,
        mismatches=row.count("mismatches") if covered else None,
    )


KINDS: dict[str, Callable[[_Row], Any]] = {"models": _model, "ops": _op, "exact": _exact}
