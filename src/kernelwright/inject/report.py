"""What an injection did, as a table."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..ops.linear import algorithms
from .first_sight import Checker, Finding

if TYPE_CHECKING:
    from .graphs import Graphs


@dataclass(frozen=True)
class Line:
    """Modules of one class at one place of a model ("transformer_blocks.*.norm1"). Either
    `replaced_by` or `left_alone` says what became of them."""

    component: str
    where: str
    kind: str
    weight: bool | None  # None: it has children, and weights where they have them
    replaced_by: str | None
    numerics: str
    left_alone: str | None


@dataclass(eq=False)
class Report:
    """What was replaced and by what; what was left alone and why; and, once the model has run,
    what the comparison with eager showed. It prints as a table."""

    target: str
    numerics: str
    lines: Counter[Line] = field(default_factory=Counter)
    checkers: list[Checker] = field(default_factory=list)
    graphs: list[Graphs] = field(default_factory=list)
    models: list[Any] = field(default_factory=list)  # weak references
    planned: bool = False

    def add(self, lines: Mapping[Line, int]) -> None:
        self.lines.update(lines)

    def as_plan(self) -> Report:
        self.planned = True
        return self

    @property
    def replaced(self) -> int:
        """How many modules have a new forward."""
        return sum(n for line, n in self.lines.items() if line.replaced_by)

    @property
    def findings(self) -> list[Finding]:
        """Every comparison with eager so far."""
        return [f for checker in self.checkers for f in checker.findings]

    @property
    def problems(self) -> list[Finding]:
        """Where the comparison with eager failed, and eager stays."""
        return [f for f in self.findings if f.problem]

    @property
    def unchecked(self) -> list[Finding]:
        """What is fused although it was not compared with eager."""
        return [f for f in self.findings if f.unchecked]

    @property
    def sites(self) -> dict[str, dict[str, int]]:
        """Fused places by name, and what became of them: {"QK-norm + RoPE": {"fused": 56}}."""
        counts: dict[str, Counter[str]] = {}
        last = {f.module: f for f in self.findings}
        for finding in last.values():
            for (name, fate), count in finding.sites.items():
                counts.setdefault(name, Counter())[fate] += count
        return {name: dict(c) for name, c in counts.items()}

    @property
    def summary(self) -> str:
        """One line: how many modules, and what the comparison with eager showed."""
        from .table import summary

        return summary(self)

    def count(self, kind: str, component: str | None = None) -> int:
        """How many replaced modules have a class of this name, in one component or in all."""
        return sum(
            n
            for line, n in self.lines.items()
            if line.replaced_by
            and line.kind.rpartition(".")[2] == kind
            and component in (None, line.component)
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "numerics": self.numerics,
            "planned": self.planned,
            "replaced": self.replaced,
            "modules": [{**asdict(line), "count": n} for line, n in self.lines.items()],
            "sites": self.sites,
            "problems": [
                {"module": f.module, "inputs": f.inputs, "problem": f.problem}
                for f in self.problems
            ],
            "unchecked": [
                {"module": f.module, "inputs": f.inputs, "why": f.unchecked} for f in self.unchecked
            ],
            "compared": len(self.findings),
            "products": [str(decision) for decision in algorithms.decisions()],
            "graphs": [g.describe() for g in self.graphs],
        }

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        console = Console(file=text, width=120, color_system=None, legacy_windows=False)
        console.print(self)
        return text.getvalue().rstrip()

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from .table import render

        yield from render(self)
