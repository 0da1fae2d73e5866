"""One comparison of a new forward with the module's own.

The module's own forward runs first. If it drew random numbers, wrote to its inputs or to itself,
running it again would not be what eager does: its result is returned, and the next call compares
the fused sites one by one, inside a single run. So does the first call of a module with hooks, code
of no library we know, a cache among its inputs, or gradients to record. A comparison on zeros or on
NaN proves nothing: the module stays eager for that call, and is compared again later.

If a forward differs in `exact`, its fused sites are tried one by one, and those that differ stay
eager; if that does not mend it, or in another tier, the whole module does. Either gives a warning
and a line in the report. A comparison may need more memory than there is. `exact` then leaves the
module eager; the other tiers go on without it, with a warning and a line in the report, too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...backends.torch_internals import any_autocast, pytree
from ..runtime import random_draws, work_ahead
from ..runtime.input_key import facts, has_state
from ..runtime.sites import (
    DIFFERS,
    NO_MEMORY,
    Forward,
    NotHere,
    eagerly,
    equal,
    set_now,
    tells,
)
from . import accuracy
from .findings import Evidence, Findings
from .running import run_eager, run_fused
from .verdicts import ModuleRecord, Verdict


@dataclass
class Comparison:
    """One module at one signature, seen for the first time."""

    findings: Findings
    module: nn.Module
    record: ModuleRecord
    key: Any
    fused: Forward
    eager: Forward
    args: Any
    kwargs: Any
    verdict: Verdict | None = None  # stays None if the values told nothing, or it has a memory
    untold: set[str] = field(default_factory=set)
    found: Evidence = field(default_factory=Evidence)
    notes: Counter[tuple[str, str]] = field(default_factory=Counter)
    off: dict[int, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.records_gradients = _records_gradients(self.module, self.args, self.kwargs)

    def run(self) -> Any:
        """The result of the call; `verdict` is set if it could be found."""
        findings = self.findings
        self.exact = findings.numerics == "exact"
        self.wanted = self.exact or findings.verify or type(self.module) not in findings.proven
        once = self.record.once or has_state(self.args, self.kwargs)
        if once or not self.wanted or self.records_gradients:
            return self._in_one_run()
        return self._side_by_side()

    def _in_one_run(self) -> Any:
        """Run fused, in `exact` with each site beside its eager steps."""
        if self.record.unknown and (self.wanted or self.record.once):
            self._conclude(False, "its code is new to us, and it cannot be run twice")
            return self._eager()
        if self.exact and any_autocast():
            # which casts between the sites, where nothing is compared
            self._conclude(False)
            return self._eager()
        result = self._fused(comparing=self.exact and self.wanted)
        self.record.state.settle(self.module)
        if not self.untold:
            self._conclude(True)
        return result

    def _side_by_side(self) -> Any:
        """Run eager, then fused, and compare."""
        ahead = work_ahead.is_offered(self.module)
        given = facts(self.args, self.kwargs)
        drawn = random_draws.so_far(self.args, self.kwargs)
        expected = self._eager()
        if (
            self.record.state.settle(self.module)
            or random_draws.so_far(self.args, self.kwargs) != drawn
            or facts(self.args, self.kwargs) != given
        ):
            self.record.once = "it has a memory, or draws random numbers"
            return expected
        problem = None
        try:
            return self._compared(expected, ahead)
        except torch.OutOfMemoryError:
            problem = NO_MEMORY
        except NotHere:
            raise
        except Exception as error:
            problem = f"its fused forward failed ({type(error).__name__}: {error})"
        # not where it was caught: that would keep the tensors of the failed run
        work_ahead.forget()
        if self.exact or problem != NO_MEMORY:
            work_ahead.refuse(self.module)
            self._conclude(False, problem)
            return expected
        expected = None
        self.found.unchecked = NO_MEMORY
        self._conclude(True)
        return self._fused(noting=False)

    def _compared(self, expected: Any, ahead: bool) -> Any:
        """The result of this call; the verdict on it, if the values allow one."""
        # layers in eight bits are held to a promise of their own
        apart = self.findings.numerics == "fp8"
        result = self._fused(fp8=not apart)
        if self.exact:
            same = equal(result, expected)
            if self.untold or not tells(*pytree.tree_leaves(expected)):
                return result if same else expected
            self.found.equal = same
            if not same:
                return self._mended(expected, ahead)
            self._conclude(True)
            return result
        if tells(*pytree.tree_leaves(expected)):
            try:
                found = accuracy.errors(
                    self.module, self.eager, self.args, self.kwargs, result, expected, eagerly
                )
                self.found.error = found.get("error")
                self.found.eager_error = found.get("eager_error")
                good = accuracy.holds(accuracy.rows(expected), **found)
            except accuracy.Unchecked as no:
                self.found.unchecked, good = str(no), True
            if not good:
                work_ahead.forget()
                work_ahead.refuse(self.module)
                self._conclude(False, "its error is too large")
                return expected
            self._conclude(True)
        else:
            self.untold.add("its result")
        if not apart:
            return result
        result = expected = None
        return self._fused(noting=False)

    def _mended(self, expected: Any, ahead: bool) -> Any:
        """Find the sites that differ, leave them eager, and see whether the rest is right."""
        work_ahead.forget()
        self.off = {}
        self._fused(comparing=True)
        result = self._fused(noting=False)
        if not equal(result, expected):
            work_ahead.forget()
            work_ahead.refuse(self.module)
            self._conclude(False, f"its forward {DIFFERS}")
            return expected
        differs = any(DIFFERS in sites.values() for sites in self.off.values())
        problem = None
        if ahead and not differs:
            # it is right by itself: the module before it worked ahead wrongly
            work_ahead.refuse(self.module)
            problem = f"what the module before it laid ready {DIFFERS}"
        self._conclude(True, problem)
        return result

    def _eager(self) -> Any:
        return run_eager(self.module, self.eager, self.args, self.kwargs)

    def _fused(self, comparing: bool = False, fp8: bool = True, noting: bool = True) -> Any:
        notes: Counter[tuple[str, str]] = Counter()
        how: dict[str, Any] = {"comparing": comparing, "fp8": fp8}
        how |= {"notes": notes, "untold": self.untold} if noting else {"notes": None}
        with set_now(**how):
            result = run_fused(
                self.module, self.record, self.key, self.off, self.fused, self.args, self.kwargs
            )
        self.notes = notes if noting else self.notes
        return result

    def _conclude(self, fused: bool, problem: str | None = None) -> None:
        off = {module: sites for module, sites in self.off.items() if sites}
        self.verdict = Verdict(fused, off)
        if fused and self.wanted:
            self.findings.proven.add(type(self.module))
        self.findings.add(self.module, self.args, self.kwargs, self.notes, off, self.found, problem)


def _records_gradients(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether autograd records this call. Memory then allows one run, and a checkpointed block must
    save the same tensors when it is run again in the backward."""
    if not torch.is_grad_enabled():
        return False
    leaves = (*pytree.tree_leaves((args, kwargs)), *module.parameters())
    return any(isinstance(t, Tensor) and t.requires_grad for t in leaves)
