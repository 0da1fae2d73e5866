"""Reads result files; a file that is none is refused in one line that says what to do."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..measure.results import SCHEMA
from .json_values import Unreadable, Values
from .parsing import KINDS
from .rows import (
    CountedRow,
    Environment,
    ExactRow,
    GenerationRow,
    ModelRow,
    OpRow,
    ProfileRow,
    TrainingRow,
    VideoRow,
)


@dataclass(frozen=True)
class Results:
    """One result file: the list of its kind is filled, or `others` for an unknown kind."""

    path: Path
    kind: str
    environment: Environment
    models: tuple[ModelRow, ...] = ()
    training: tuple[TrainingRow, ...] = ()
    generation: tuple[GenerationRow, ...] = ()
    ops: tuple[OpRow, ...] = ()
    exact: tuple[ExactRow, ...] = ()
    video: tuple[VideoRow, ...] = ()
    profile: tuple[ProfileRow | CountedRow, ...] = ()
    others: tuple[dict[str, Any], ...] = ()


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
        raise Unreadable(
            f"{path}: has no schema, so it is no result file; --out writes one, not --json"
        )
    if content["schema"] != SCHEMA:
        raise Unreadable(
            f"{path}: schema {content['schema']!r}, this version reads {SCHEMA}; "
            "measure again, or use the version that wrote it"
        )
    kind, environment, rows = (content.get(name) for name in ("kind", "environment", "rows"))
    if not isinstance(kind, str):
        raise Unreadable(f"{path}: kind {kind!r} is no name; known are {', '.join(KINDS)}")
    if not isinstance(environment, dict):
        raise Unreadable(f"{path}: no environment, so its GPU is unknown; measure again")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise Unreadable(f"{path}: no rows; measure again")
    made = Environment(**{f.name: environment.get(f.name) for f in fields(Environment)})
    if kind not in KINDS:
        return Results(path, kind, made, others=tuple(rows))
    head = Values(str(path), content)
    typed = tuple(KINDS[kind](Values(f"{path}: row {n}", r), head) for n, r in enumerate(rows, 1))
    return Results(path, kind, made, **{kind: typed})
