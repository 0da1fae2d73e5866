"""Level 1: torch.profiler. Kernels ranked and grouped, graph breaks counted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..backends.torch_internals import compile_counters
from ..measure.timing import milliseconds
from .categories import KernelTime, by_category, category
from .our_kernels import is_ours
from .record import record
from .workload import Workload

SECONDS = 0.5


def profile(workload: Workload, config: str, trace: Path | None = None) -> dict[str, Any]:
    """One forward: its kernels by category and by name, and its time without a profiler."""
    compile_counters().clear()
    with workload.warm(config) as forward:
        breaks = graph_breaks() if "compile" in config.split("+") else None
        wall = milliseconds(forward, SECONDS)
        kernels = record(forward, workload.device, trace)
    return summary(workload, config, kernels, level=1) | {"wall_ms": wall, "graph_breaks": breaks}


def summary(
    workload: Workload, config: str, kernels: Iterable[KernelTime], level: int
) -> dict[str, Any]:
    """A result row: the workload, the time of each category, and every kernel, longest first."""
    ranked = sorted(kernels, key=lambda kernel: -kernel.ms)
    return {
        "level": level,
        **workload.describe(),
        "config": config,
        "kernel_ms": sum(k.ms for k in ranked),
        "launches": sum(k.calls for k in ranked),
        "categories": by_category(ranked),
        "kernels": [
            {
                "name": k.name,
                "category": category(k.name),
                "ours": is_ours(k.name),
                "calls": k.calls,
                "ms": k.ms,
            }
            for k in ranked
        ],
    }


def graph_breaks() -> dict[str, Any]:
    """Graphs and graph breaks of torch.compile since its counters were cleared, with reasons."""
    counters = compile_counters()
    reasons = {reason.splitlines()[0]: n for reason, n in counters["graph_break"].items()}
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(reasons.values()),
        "reasons": reasons,
    }
