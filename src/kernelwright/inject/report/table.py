"""A report as text: the table, and the lines below it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ...backends.torch_internals import is_compiled
from ...ops.linear import algorithms
from .record import Record


def render(report: Record) -> Iterator[Any]:
    from rich.table import Table

    if not report.lines:
        yield f"{report.target}: nothing in it that the kernels could replace."
        return
    table = Table(title=f"{report.target}, numerics={report.numerics!r}", title_justify="left")
    several = len({line.component for line in report.lines}) > 1
    for name in (*(["component"] if several else []), "module", "count", "what happens to it"):
        # folded, not cut: two names that are cut could look alike
        table.add_column(name, justify="right" if name == "count" else "left", overflow="fold")
    rows: Counter[tuple[str, str, str | None, str | None]] = Counter()
    for line, count in report.lines.items():
        rows[line.component, line.kind, line.replaced_by, line.left_alone] += count
    for (component, kind, does, why), count in sorted(
        rows.items(), key=lambda item: item[0][2] is None
    ):
        cells = [short_kind(kind), str(count), fate(does, why)]
        table.add_row(*([component] if several else []), *cells, style=None if does else "dim")
    yield table
    yield summary(report)
    yield from filter(None, (resting.describe() for resting in report.resting))
    yield from map(str, report.blocks)
    yield from report.gradients
    for programs in report.programs:
        for (where, why), count in programs.fell_back.items():
            yield f"! {where}: {count} calls ran PyTorch's ops: {why}"
    for finding in report.problems:
        yield f"! {finding.module} at {finding.inputs}: {finding.problem}; that stays eager"
    for finding in report.unchecked:
        where = f"{finding.module} at {finding.inputs}"
        yield f"! {where}: not compared with eager: {finding.unchecked}"
    if algorithms.decisions():
        yield f"In this process {algorithms.describe()}."
    yield from report.graph_lines


def fate(replaced_by: str | None, left_alone: str | None) -> str:
    return replaced_by or f"left alone: {left_alone}"


def short_kind(kind: str) -> str:
    """torch.nn.modules.normalization.RMSNorm -> torch RMSNorm"""
    return f"{kind.partition('.')[0]} {kind.rpartition('.')[2]}"


# kinds of findings, and how many of them there are
IN_EIGHT_BITS = {
    "Linear": "layers in fp8",
    "Linear of few rows": "layers with int8 weights",
    "attention": "attentions in eight bits",
}


def summary(report: Record) -> str:
    verb = "would be replaced" if report.planned else "replaced"
    text = f"{report.replaced} modules {verb}"
    findings = report.findings
    if not findings and not report.not_in_fp8:
        text += f"; {_not_compared(report)}"
    compared = [f for f in findings if f.equal is not None]
    if compared:
        same = sum(bool(f.equal) for f in compared)
        text += f"; {same} of {len(compared)} comparisons with eager gave the same bits"
    errors = [f for f in findings if f.error is not None and f.eager_error]
    if errors:
        worst = max(f.error / f.eager_error for f in errors)  # type: ignore[operator]
        text += f"; error at most {worst:.2f} of eager's in {len(errors)} comparisons"
    in_fp8 = [f for f in findings if f.error is not None and f.eager_error is None]
    for kind, what in IN_EIGHT_BITS.items():
        found = [f.error for f in in_fp8 if f.kind == kind and f.error is not None]
        if found:
            text += f"; {len(found)} {what}, off by at most {max(found):.1%}"
    for why, count in report.not_in_fp8.items():
        text += f"; {count} layers not in fp8: {why}"
    if uninformative := sum(len(c.uninformative) for c in report.checkers):
        text += f"; {uninformative} modules stay eager until their values are not all zeros or NaN"
    if postponed := sum(len(c.postponed) for c in report.checkers):
        text += (
            f"; {postponed} modules ran as they are at a further shape, until it comes more often"
        )
    return text + "."


def _not_compared(report: Record) -> str:
    """Why no comparison was made."""
    if report.planned:
        return "nothing was changed"
    models = [m for reference in report.models if (m := reference()) is not None]
    if any(is_compiled(m) for model in models for m in model.modules()):
        return "compiled: what torch.compile runs is not compared with eager"
    if any(c.gradients for c in report.checkers):
        return "not run without gradients yet"
    return "not run yet"
