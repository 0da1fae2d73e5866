"""What `kernelwright bench model` shows of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..measure.cpu_caveat import caveats

LEFT = ("model", "config")
# columns that are shown if any row has a value
OPTIONAL = {"cold s": "cold_s", "warm s": "warm_s", "GiB": "peak_gib", "skipped": "skipped"}
OPTIONAL["PSNR dB"] = "psnr"
SPLIT = ("GEMM", "attention", "fused", "other")


def table(rows: Sequence[dict[str, Any]], title: str = "One forward") -> Table:
    """One line a configuration, with the milliseconds of each kind of kernel."""
    optional = {head: name for head, name in OPTIONAL.items() if any(name in r for r in rows)}
    kinds = SPLIT if any("split" in r for r in rows) else ()
    shown = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    heads = (*LEFT, "ms", "speed-up", "first s", *optional, "bits", "error", *kinds)
    for head in heads:
        shown.add_column(head, justify="left" if head in LEFT else "right")
    eager = {_key(r): r["ms"] for r in rows if r["config"] == "eager" and "ms" in r}
    for row in rows:
        if "failed" in row:
            shown.add_row(row["model"], row["config"], "–", style=_style(row))
            continue
        base, split = eager.get(_key(row)), row.get("split", {})
        shown.add_row(
            row["model"],
            row["config"],
            f"{row['ms']:.1f}",
            f"{base / row['ms']:.2f}×" if base else "",
            _number(row.get("first_s"), ".1f"),
            *(_number(row.get(name), ".1f") for name in optional.values()),
            "same" if row["equal"] else _differ(row.get("differing")),
            _number(row["error"], ".2e"),
            *(_number(split.get(kind), ".1f") for kind in kinds),
        )
    return shown


def notes(rows: Sequence[dict[str, Any]]) -> list[Text]:
    """Why some configurations have no time, a line for those of a model that share a reason; calls
    that ran without a graph; layers that are not in fp8; and the caveat of a CPU."""
    failed = (row for row in rows if "failed" in row)
    shared = groupby(failed, lambda row: (row["model"], row["failed"], _style(row)))
    reasons = [
        Text(f"{model} {', '.join(row['config'] for row in group)}: {reason}", style=style)
        for (model, reason, style), group in shared
    ]
    without = [
        Text(f"{row['model']} {row['config']}: {graphs}", style="yellow")
        for row in rows
        for graphs in row.get("graphs", ())
        if "without" in graphs
    ]
    wider = [
        Text(f"{row['model']} {row['config']}: {count} layers not in fp8: {why}", style="yellow")
        for row in rows
        for why, count in row.get("not_in_fp8", {}).items()
    ]
    return [*reasons, *without, *wider, *(Text(text, style="yellow") for text in caveats(rows))]


def _style(row: dict[str, Any]) -> str:
    return "yellow" if row.get("unavailable") else "red"


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["model"], str(row["sizes"])


def _differ(share: float | None) -> str:
    return "differ" if share is None else f"{share:.1%} differ"


def _number(value: float | None, form: str) -> str:
    if isinstance(value, int):
        return str(value)
    return "" if value is None else f"{value:{form}}"
