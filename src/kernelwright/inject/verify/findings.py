"""The results of comparisons with eager, and the warnings about them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from ...backends.user_warnings import warn
from ..runtime.sites import DIFFERS

MAX_FINDINGS = 16384
EAGER = "runs as without injection"
NO_BACKWARD = f"{EAGER}: it has no fused backward"


@dataclass
class Evidence:
    """What one comparison measured."""

    equal: bool | None = None
    error: float | None = None
    eager_error: float | None = None
    unchecked: str | None = None


@dataclass(frozen=True)
class Finding:
    """The result for one module at one signature of its inputs."""

    module: str
    kind: str
    inputs: str
    sites: dict[tuple[str, str], int]  # how often: (name of a site, "fused" or why not)
    equal: bool | None = None  # None: not compared bit for bit
    error: float | None = None
    eager_error: float | None = None
    problem: str | None = None  # why it stays eager
    unchecked: str | None = None  # why it is fused although it was not compared


@dataclass
class Findings:
    """All findings of one injection."""

    numerics: str
    verify: bool
    names: WeakKeyDictionary[nn.Module, str] = field(default_factory=WeakKeyDictionary)
    findings: deque[Finding] = field(default_factory=lambda: deque(maxlen=MAX_FINDINGS))
    # layers that were meant to run in fp8 and do not, and why
    misfits: WeakKeyDictionary[nn.Module, str] = field(default_factory=WeakKeyDictionary)
    # modules not compared yet because their values were zeros or NaN
    uninformative: WeakKeyDictionary[nn.Module, bool] = field(default_factory=WeakKeyDictionary)
    # modules that were called once at a further shape, and are compared when it comes again
    postponed: WeakKeyDictionary[nn.Module, bool] = field(default_factory=WeakKeyDictionary)
    # (class, how its modules run while gradients are recorded), and how many blocks do so
    gradients: Counter[tuple[str, str]] = field(default_factory=Counter)
    # classes of which one module has been compared
    proven: set[type] = field(default_factory=set)

    def add(
        self,
        module: nn.Module,
        inputs: str,
        notes: Counter[tuple[str, str]],
        off: dict[int, dict[str, str]],
        evidence: Evidence,
        problem: str | None = None,
    ) -> None:
        """Add a finding; warn if the module, or one of its sites, stays eager or is unchecked."""
        eager_sites = {name: why for sites in off.values() for name, why in sites.items()}
        for name, why in eager_sites.items():
            notes[name, why] = notes.pop((name, "fused"), 1)
        if different := sorted(name for name, why in eager_sites.items() if why == DIFFERS):
            problem = problem or f"{', '.join(different)} {DIFFERS}"
        kind = type(module).__name__
        name = self.names.get(module, f"a {kind}")
        self.findings.append(
            Finding(name, kind, inputs, dict(notes), problem=problem, **vars(evidence))
        )
        if problem:
            warn(f"{name} at {inputs}: {problem}; that stays eager")
        elif evidence.unchecked:
            warn(f"{name} at {inputs} was not compared with eager: {evidence.unchecked}")
