"""The section about ops: how close each comes to memory bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .charts import Bar, Dot, Piece, bars, legend, roofline
from .figures import roof
from .markup import NONE, Html, joined, number, table, tag
from .rows import OpRow


def ops_section(rows: Sequence[OpRow]) -> list[Html]:
    """Roofline, speed-ups, the chosen kernel of each case, and folded, every implementation."""
    ways = {"exact": "exact, slowest chain", "fused": "chosen kernel", "compile": "torch.compile"}
    dots = [dot for row in rows for dot in _dots(row)]
    entries = [("roof", "copy, measured in the same run"), *ways.items(), ("eager", "eager")]
    wrong = [f"{row.op} {row.case} {row.dtype}, {text}" for row in rows for text in row.failed]
    return [
        *(tag("p", text, class_="bad") for text in wrong),
        tag("h5", "Bandwidth reached, against a copy of as many bytes"),
        roofline(dots, roof(rows), "GB/s of each op over the bytes it moves, and of a copy"),
        legend(entries),
        tag("h5", "Exact, slowest chain: speed-up over eager, median of the cases"),
        _op_bars(rows),
        tag("h5", "The chosen kernel of each case, its slowest exact chain, peers (times as long)"),
        _op_table(rows),
        tag("details", joined((tag("summary", "Every way of every case"), _way_table(rows)))),
    ]


def _shown(row: OpRow) -> dict[str, str]:
    """The implementations of a row that are drawn, by colour."""
    known = {"eager": "eager", "compile": "compile", "fused": row.chosen}
    found = {colour: way for colour, way in known.items() if way in row.us}
    return {**found, **({"exact": row.slowest_exact} if row.slowest_exact else {})}


def _dots(row: OpRow) -> list[Dot]:
    return [
        Dot(
            row.megabytes,
            row.bandwidth(way),
            colour,
            f"{row.op} {row.case} {way}: {row.bandwidth(way):.0f} GB/s",
        )
        for colour, way in _shown(row).items()
    ]


def _op_bars(rows: Sequence[OpRow]) -> Html:
    gains: dict[str, list[float]] = {}
    for row in rows:
        if row.slowest_exact and "eager" in row.us:
            gain = row.us["eager"] / row.us[row.slowest_exact]
            gains.setdefault(row.op, []).append(gain)
    middle = {op: statistics.median(seen) for op, seen in gains.items()}
    lines = [
        Bar(op, f"{gain:.2f}×", (Piece(0, gain, "exact", f"{op}: {gain:.2f}×"),))
        for op, gain in sorted(middle.items(), key=lambda item: -item[1])
    ]
    return bars(lines, "speed-up of each op over eager", mark=1.0) if lines else Html("")


def _op_table(rows: Sequence[OpRow]) -> Html:
    """One line a case: the chosen kernel, and how much longer each peer takes."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row.peers))
    head = ["op", "case", "chosen", "µs", "host µs", "GB/s", "of copy", "exact µs"]
    lines = []
    for row in rows:
        way, us = row.chosen, row.us
        known = way in us
        lines.append(
            [
                row.op,
                row.case if row.dtype == "bfloat16" else f"{row.case} {row.dtype}",
                way,
                number(us.get(way), ".1f"),
                number(row.host_us.get(way), ".1f"),
                f"{row.bandwidth(way):.0f}" if known else NONE,
                f"{row.share(way):.0%}" if known else NONE,
                number(us.get(row.slowest_exact or ""), ".1f"),
                *(_peer(row, peer) for peer in peers),
            ]
        )
    return table([*head, *(f"{peer} µs" for peer in peers)], lines, words=3)


def _peer(row: OpRow, peer: str) -> str:
    if peer not in row.us:
        return NONE
    over = f" ({row.us[peer] / row.us[row.chosen]:.2f}×)" if row.chosen in row.us else ""
    return f"{row.us[peer]:.1f}{over}"


def _way_table(rows: Sequence[OpRow]) -> Html:
    head = ["op", "case", "dtype", "way", "MB", "µs", "host µs", "GB/s", "of copy", "error"]
    lines = [
        [
            row.op,
            row.case,
            row.dtype,
            way,
            f"{row.megabytes:.1f}",
            f"{us:.1f}",
            number(row.host_us.get(way), ".1f"),
            f"{row.bandwidth(way):.0f}",
            f"{row.share(way):.0%}",
            number(row.error.get(way), ".2e"),
        ]
        for row in rows
        for way, us in row.us.items()
    ]
    return table(head, lines, words=4)
