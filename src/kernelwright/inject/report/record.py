"""What an injection did, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ...ops.linear import algorithms
from ..reuse.programs import BlockLine, Programs
from ..verify.findings import Finding
from ..verify.first_sight import Checker

if TYPE_CHECKING:
    from ..fp8.resting import Resting
    from ..graphs.graphs import Graphs


@dataclass(frozen=True)
class Line:
    """Modules of one class at one place of a model ("transformer_blocks.*.norm1"). One of
    `replaced_by` and `left_alone` is set."""

    component: str
    where: str
    kind: str
    weight: bool | None  # whether it has a weight of its own; None: it has children
    replaced_by: str | None
    numerics: str
    left_alone: str | None


@dataclass(eq=False)
class Record:
    """What was replaced and by what; what was left alone and why; and, once the model has run,
    what the comparison with eager showed."""

    target: str
    numerics: str
    lines: Counter[Line] = field(default_factory=Counter)
    checkers: list[Checker] = field(default_factory=list)
    programs: list[Programs] = field(default_factory=list)
    graphs: list[Graphs] = field(default_factory=list)
    resting: list[Resting] = field(default_factory=list)
    models: list[Any] = field(default_factory=list)  # weak references
    planned: bool = False

    def add(self, lines: Mapping[Line, int]) -> None:
        self.lines.update(lines)

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
        """Where the comparison with eager failed: these stay eager."""
        return [f for f in self.findings if f.problem]

    @property
    def unchecked(self) -> list[Finding]:
        """What runs fused without having been compared with eager, and why."""
        return [f for f in self.findings if f.unchecked]

    @property
    def sites(self) -> dict[str, dict[str, int]]:
        """Fusion sites by name, and what became of them: {"QK-norm + RoPE": {"fused": 56}}."""
        counts: dict[str, Counter[str]] = {}
        last = {f.module: f for f in self.findings}
        for finding in last.values():
            for (name, fate), count in finding.sites.items():
                counts.setdefault(name, Counter())[fate] += count
        return {name: dict(c) for name, c in counts.items()}

    @property
    def not_in_fp8(self) -> dict[str, int]:
        """Why layers that `fp8` would serve are not in fp8, and how many."""
        return dict(Counter(why for c in self.checkers for why in c.misfits.values()))

    @property
    def blocks(self) -> list[BlockLine]:
        """Blocks that run as generated kernels, one line for each class, once they have run."""
        return [line for programs in self.programs for line in programs.described()]

    @property
    def gradients(self) -> list[str]:
        """How modules of each class run while gradients are recorded, once they have."""
        found = (item for checker in self.checkers for item in checker.gradients.items())
        return [
            f"{kind}, while gradients are recorded: {how}{f' ({n} blocks)' if n > 1 else ''}"
            for (kind, how), n in found
        ]

    @property
    def graph_lines(self) -> list[str]:
        """How many graphs there are, and which calls ran without one, with reasons."""
        lines = [line for g in self.graphs for line in (g.describe(), g.describe_training())]
        return list(filter(None, lines))

    def count(self, kind: str, component: str | None = None) -> int:
        """How many modules of this class were replaced, in one component or in all."""
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
            "blocks": [asdict(line) for line in self.blocks],
            "gradients": self.gradients,
            "problems": [
                {"module": f.module, "inputs": f.inputs, "problem": f.problem}
                for f in self.problems
            ],
            "unchecked": [
                {"module": f.module, "inputs": f.inputs, "why": f.unchecked} for f in self.unchecked
            ],
            "compared": len(self.findings),
            "products": [str(decision) for decision in algorithms.decisions()],
            "graphs": self.graph_lines,
        }
