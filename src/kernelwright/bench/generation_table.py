"""What `kernelwright bench generate` shows of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

LEFT = ("model", "config")
HEADS = ("tokens/s", "ms/token", "speed-up", "first token ms", "first s", "tokens", "bits")


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line a configuration."""
    sizes = rows[0]["sizes"] if rows else {}
    title = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in sizes.items())
    shown = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in (*LEFT, *HEADS):
        shown.add_column(head, justify="left" if head in LEFT else "right")
    timed = [r for r in rows if "ms" in r]
    eager = {r["model"]: r["ms"] for r in timed if r["config"] == "eager+static"}
    eager |= {r["model"]: r["ms"] for r in timed if r["config"] == "eager"}
    for row in rows:
        if "failed" in row:
            shown.add_row(row["model"], row["config"], "–", style="red")
            continue
        base = eager.get(row["model"])
        shown.add_row(
            row["model"],
            row["config"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['ms']:.2f}",
            f"{base / row['ms']:.2f}×" if base else "",
            f"{row['first_token_ms']:.1f}",
            f"{row['first_s']:.1f}",
            _same(row, "tokens_equal"),
            _same(row, "equal"),
        )
    return shown


def _same(row: dict[str, Any], what: str) -> str:
    if row[what]:
        return "same"
    return "differ" if row.get("eager_repeats", True) else "eager varies"
