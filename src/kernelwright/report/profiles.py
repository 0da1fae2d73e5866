"""The section about profiles: time by category, the longest kernels, ncu's counters."""

from __future__ import annotations

from collections.abc import Sequence

from ..profiling.categories import NOTE
from ..profiling.kernel_tables import short_name
from .figures import Profile, profiled
from .markup import NONE, Html, joined, number, table, tag
from .rows import CountedRow, ProfileRow
from .waterfall import waterfall

LONGEST = 10


def profiles_section(profiles: Sequence[Profile]) -> list[Html]:
    """For each profile: a step before and after by category, and its kernels."""
    articles = [tag("article", joined(_profile(profile), "\n")) for profile in profiles]
    return [tag("p", NOTE, class_="note"), *articles]


def _profile(profile: Profile) -> list[Html]:
    pieces = [tag("h4", profile.title)]
    if profile.rows:
        if profile.steps:
            pieces.append(waterfall(profile.title, profile.steps))
        pieces.append(_categories(profile.rows))
        pieces.append(tag("h5", "The longest kernels, ours in bold: ms of all calls (calls)"))
        pieces.append(_kernels(profile.rows))
    if profile.counted:
        pieces.append(_counters(profile.counted))
        pieces += _advice(profile.counted)
    return pieces


def _categories(rows: Sequence[ProfileRow]) -> Html:
    """Milliseconds of each category, a column for each configuration."""
    columns = [(row, parts) for row, parts in profiled(*rows)]
    names = dict.fromkeys(name for _, parts in columns for name, ms in parts.items() if ms)
    lines = [[name, *(f"{p.get(name, 0.0):.2f}" for _, p in columns)] for name in names]
    lines.append(["all kernels", *(f"{row.kernel_ms:.2f}" for row in rows)])
    lines.append(["launches", *(f"{row.launches:,}" for row in rows)])
    if any(row.graph_breaks is not None for row in rows):
        lines.append(["graph breaks", *(number(row.graph_breaks, "") for row in rows)])
    head = ["ms a forward", *(row.config for row in rows)]
    inside = joined((tag("summary", "By category"), table(head, lines)))
    return tag("details", inside, open="")


def _kernels(rows: Sequence[ProfileRow]) -> Html:
    by_config = [{kernel.name: kernel for kernel in row.kernels} for row in rows]
    longest: dict[str, float] = {}
    for kernel in (k for row in rows for k in row.kernels):
        longest[kernel.name] = max(kernel.ms, longest.get(kernel.name, 0.0))
    lines = []
    for name in sorted(longest, key=lambda name: -longest[name])[:LONGEST]:
        seen = [kernels.get(name) for kernels in by_config]
        known = next(kernel for kernel in seen if kernel)
        cells = (f"{k.ms:.2f} ({k.calls:,})" if k else NONE for k in seen)
        lines.append([_name(name, known.ours), known.category, *cells])
    return table(["kernel", "category", *(row.config for row in rows)], lines, words=2)


def _name(name: str, ours: bool = False) -> Html:
    return tag("strong" if ours else "span", short_name(name), class_="kernel")


def _counters(rows: Sequence[CountedRow]) -> Html:
    head = ["kernel", "config", "grid", "launches", "µs", "DRAM GB/s", "of peak"]
    head += ["SM busy", "occupancy", "limiter"]
    lines = [
        [
            _name(row.name),
            row.config,
            row.grid,
            f"{row.launches}",
            number(row.us, ".1f"),
            number(row.dram_gbs, ".0f"),
            _percent(row.dram_percent),
            _percent(row.compute_percent),
            f"{_percent(row.occupancy)} of {_percent(row.theoretical_occupancy)}",
            row.limiter or NONE,
        ]
        for row in rows
    ]
    return table(head, lines, words=3)


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}%"


def _advice(rows: Sequence[CountedRow]) -> list[Html]:
    """Each piece of advice once, with its kernels."""
    kernels: dict[str, list[str]] = {}
    for row in rows:
        kernels.setdefault(row.advice, []).append(f"{short_name(row.name)} {row.grid}")
    return [
        tag("p", f"{', '.join(dict.fromkeys(names))}: {advice}.", class_="note")
        for advice, names in kernels.items()
    ]
