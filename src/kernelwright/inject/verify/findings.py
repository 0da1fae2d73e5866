"""What comparisons with eager have shown, and the warnings that say so."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..runtime.input_key import in_words
from ..runtime.sites import DIFFERS

MAX_FINDINGS = 16384


@dataclass
class Evidence:
    """What one comparison measured."""

    equal: bool | None = None
    error: float | None = None
    eager_error: float | None = None
    unchecked: str | None = None


@dataclass(frozen=True)
class Finding:
    """One module at one signature of its inputs."""

    module: str
    kind: str
    inputs: str
    sites: dict[tuple[str, str], int]  # (name of a site, what became of it): how often
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
    # layers that were to run in fp8 and are called in a way that rules it out, and why
    misfits: WeakKeyDictionary[nn.Module, str] = field(default_factory=WeakKeyDictionary)
    # modules whose inputs were all zeros or NaN so far
    untold: WeakKeyDictionary[nn.Module, bool] = field(default_factory=WeakKeyDictionary)
    # classes of which one module was compared
    proven: set[type] = field(default_factory=set)

    def add(
        self,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        notes: Counter[tuple[str, str]],
        off: dict[int, dict[str, str]],
        evidence: Evidence,
        problem: str | None = None,
    ) -> None:
        """Write down what became of a module; warn if it, or a site of it, stays eager."""
        left_out = {name: why for sites in off.values() for name, why in sites.items()}
        for name, why in left_out.items():
            notes[name, why] = notes.pop((name, "fused"), 1)
        if different := sorted(name for name, why in left_out.items() if why == DIFFERS):
            problem = problem or f"{', '.join(different)} {DIFFERS}"
        kind, inputs = type(module).__name__, in_words(args, kwargs)
        name = self.names.get(module, f"a {kind}")
        self.findings.append(
            Finding(name, kind, inputs, dict(notes), problem=problem, **vars(evidence))
        )
        if problem:
            warnings.warn(f"{name} at {inputs}: {problem}; that stays eager", stacklevel=8)
        elif evidence.unchecked:
            text = f"{name} at {inputs} was not compared with eager: {evidence.unchecked}"
            warnings.warn(text, stacklevel=8)
