"""What `kernelwright bench train` shows of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line a configuration."""
    head = title(rows[0]) if rows else "One training step"
    shown = Table(title=head, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in ("model", "config"):
        shown.add_column(head)
    heads = ("ms", "speed-up", "GiB", "first s", "gradients equal", "losses equal", "error")
    for head in heads:
        shown.add_column(head, justify="right")
    eager = {row["model"]: row["ms"] for row in rows if row["config"] == "eager" and "ms" in row}
    for row in rows:
        if "failed" in row:
            style = "yellow" if row.get("unavailable") else "red"
            shown.add_row(row["model"], row["config"], "–", style=style)
            continue
        base, memory, error = eager.get(row["model"]), row.get("reserved_gib"), row["error"]
        shown.add_row(
            row["model"],
            row["config"],
            f"{row['ms']:.1f}",
            f"{base / row['ms']:.2f}×" if base else "",
            "" if memory is None else f"{memory:.1f}",
            f"{row['first_s']:.1f}",
            f"{row['gradients_equal']} of {row['gradients']}",
            f"{row['losses_equal']} of {row['losses']}",
            "" if error is None else f"{error:.2e}",
        )
    return shown


def title(row: dict[str, Any]) -> str:
    """What was trained: `One training step, LoRA rank 64, checkpointing, flash attention`."""
    words = ["One training step"]
    words.append(f"LoRA rank {row['lora']}" if row["lora"] else "all weights")
    words += ["checkpointing"] if row["checkpointing"] else []
    words += [f"{row['attention']} attention"] if row["attention"] != "default" else []
    return ", ".join(words)
