"""What every table with times of a CPU says below it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CAVEAT = "Timed on the CPU, where the ops run in plain PyTorch: compare the bits, not the times."


def caveats(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The caveat, if any of these rows was timed on a CPU."""
    return [CAVEAT] if any(row.get("device") == "cpu" for row in rows) else []
