"""What `kernelwright check` prints: a table of parts, and the verdict."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .check import PEERS, Part, Report

# failures to print for each part
SHOWN = 8


def page(report: Report) -> RenderableType:
    """The parts, their figures, and the verdict."""
    parts = Table.grid(padding=(0, 2, 0, 0))
    for part in report.parts:
        parts.add_row(Text(part.name, style="bold"), _outcome(part), f"{part.seconds:.1f} s")
    lines: list[RenderableType] = [Text(f"{report.op}: {report.formula}", style="bold"), parts]
    for part in report.parts:
        if part.rows and part.name in SHOW_ROWS:
            lines.append(SHOW_ROWS[part.name](part.rows))
    lines.append(
        Text(report.verdict, style="bold green" if report.good else "bold red"),
    )
    return Group(*lines)


def _outcome(part: Part) -> Text:
    if part.skipped:
        return Text(f"not run: {part.skipped}", style="yellow")
    text = Text(part.summary, style="red" if part.failures else "green")
    for failure in part.failures[:SHOWN]:
        text.append(f"\n{failure}")
    if len(part.failures) > SHOWN:
        text.append(f"\nand {len(part.failures) - SHOWN} more (--json lists all)")
    return text


def _cubins(rows: tuple[dict[str, Any], ...]) -> Table:
    """Registers and spills by architecture."""
    shown = Table("kernel", "GPU", "compiled", "registers", "spilled bytes")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["backend"], row["arch"]), []).append(row["used"])
    for (backend, arch), used in groups.items():
        registers = sorted({u["registers"] for u in used})
        span = f"{registers[0]} to {registers[-1]}" if len(registers) > 1 else str(registers[0])
        spilled = max(u["stores"] for u in used)
        shown.add_row(backend, arch, str(len(used)), span, str(spilled))
    return shown


def _times(rows: tuple[dict[str, Any], ...]) -> RenderableType:
    from ..bench.ops_table import page as table
    from ..bench.peers import PEERS as KNOWN

    return table(rows, [KNOWN[name].column for name in PEERS])


SHOW_ROWS = {"cubins": _cubins, "benchmark": _times}
