"""One comparison of a new forward with the module's own.

The module's own forward runs first. If it drew random numbers or wrote to its inputs or to itself,
it must not run twice: its result is returned, and the next call compares the fusion sites one by
one, inside a single run. So does the first call of a module with hooks, with code of an unknown
library or with a cache among its inputs; but a recorded block runs again on a copy of its cache. A
comparison on zeros or NaN proves nothing: the module stays eager for that call, and is compared
again later.

A recorded block of a model on a GPU returns its own forward's result, and whether the other is the
same is asked when the model's forward has ended (`runtime/comparisons.py`).

If a forward differs in `exact`, its fusion sites are tried one by one, and those that differ stay
eager; if it still differs, or in another tier, the whole module stays eager. If memory is too short
to compare, `exact` leaves the module eager, and the other tiers run it fused without a comparison.
Each of these gives a warning and a line in the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...backends.torch_internals import any_autocast, pytree
from ..graphs.capture import given_state, leave_for_next_call
from ..runtime import comparisons, random_draws, work_ahead
from ..runtime.cache_copies import CacheCopies, can_copy
from ..runtime.informative import Uninformative, informative
from ..runtime.input_key import CONTAINERS, has_state, held_by, in_words, is_plain, versions
from ..runtime.sites import (
    DIFFERS,
    NO_MEMORY,
    BackendUnavailable,
    Declined,
    Forward,
    eagerly,
    equal,
    same_strides,
    set_mode,
)
from . import accuracy
from .findings import Evidence, Findings
from .running import run_eager, run_fused
from .verdicts import ModuleRecord, Verdict

DIFFERED = "what differs from eager is looked for first"
OTHER_STRIDES = "its result has other strides than eager's"


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
    settled: Callable[[Comparison], None]  # called when a deferred one is concluded
    waits: bool = False  # whether the outcome is not known yet
    verdict: Verdict | None = None  # None if the values prove nothing, or the module has state
    uninformative: Uninformative = field(default_factory=Uninformative)
    found: Evidence = field(default_factory=Evidence)
    notes: Counter[tuple[str, str]] = field(default_factory=Counter)
    off: dict[int, dict[str, str]] = field(default_factory=dict)
    caches: CacheCopies | None = None  # of keys and values, as they were before

    def run(self) -> Any:
        """The result of the call; sets `verdict` if there is one."""
        findings = self.findings
        self.exact = findings.numerics == "exact"
        self.inputs = in_words(self.args, self.kwargs)
        self.wanted = self.exact or findings.verify or type(self.module) not in findings.proven
        given_state(v for v in (*self.args, *self.kwargs.values()) if not is_plain(v))
        run_once = self.record.run_once or has_state(self.args, self.kwargs)
        if self._is_recorded and not self.record.run_once:  # it runs again on copies of its caches
            copied = can_copy(self.module, self.args, self.kwargs)
            run_once = not copied or self.key in self.record.declined
        if run_once or not self.wanted:
            return self._in_one_run()
        return self._side_by_side()

    @property
    def _is_recorded(self) -> bool:
        fused: Any = self.fused
        return fused.patch.signature is not None

    def _in_one_run(self) -> Any:
        """Run fused, and in `exact` compare each site with its eager steps."""
        if self.record.unknown and (self.wanted or self.record.run_once):
            self._conclude(False, "no recipe was written for its code, and it must not run twice")
            return self._eager()
        if self.exact and any_autocast():
            # autocast casts between the sites, where nothing is compared
            self._conclude(False)
            return self._eager()
        result = self._fused(comparing=self.exact and self.wanted)
        self.record.state.ignore_changed(self.module)
        if not self.uninformative:
            self._conclude(True)
        return result

    def _side_by_side(self) -> Any:
        """Run eager, then fused, and compare."""
        ahead = work_ahead.is_offered(self.module)
        buffers = list(self.module.buffers())
        held = [t for t in held_by(self.module) if not isinstance(t, nn.Parameter)]
        given = versions((self.args, *held, *buffers), self.kwargs)
        # the op of batch norm, which writes to them in training mode alone, counts no version
        before = [t.clone() for t in buffers] if self.module.training else []
        states = random_draws.generator_states(self.args, self.kwargs)
        try:
            self.caches = CacheCopies.of(self.module, self.args, self.kwargs)
        except torch.OutOfMemoryError:
            self._conclude(False, NO_MEMORY)
            return self._eager()
        expected = self._eager()
        if (
            self.record.state.ignore_changed(self.module)
            or random_draws.generator_states(self.args, self.kwargs) != states
            or versions((self.args, *held, *self.module.buffers()), self.kwargs) != given
            or not equal(before, buffers[: len(before)])
        ):
            self.record.run_once = "it has state, or draws random numbers"
            given_state(v for v in (*self.args, *self.kwargs.values()) if isinstance(v, CONTAINERS))
            return expected
        if self.caches is not None and self.caches.hold_one_token():
            self.uninformative.add("a cache of one token")
            return expected
        problem = None
        try:
            return self._compared(expected, ahead)
        except torch.OutOfMemoryError:
            problem = NO_MEMORY
        except BackendUnavailable:
            raise
        except Declined:  # its sites are compared one by one, in a single run
            work_ahead.forget()
            self.record.declined.add(self.key)
            return expected
        except Exception as error:
            problem = f"its fused forward failed ({type(error).__name__}: {error})"
        # outside `except`, whose traceback keeps the tensors of the failed run
        work_ahead.forget()
        if self.exact or problem != NO_MEMORY or self.caches is not None:
            work_ahead.refuse(self.module)
            self._conclude(False, problem)
            return expected
        expected = None
        self.found.unchecked = NO_MEMORY
        self._conclude(True)
        return self._fused(noting=False)

    def _compared(self, expected: Any, ahead: bool) -> Any:
        """The result of this call; sets the verdict if the values allow one."""
        # fp8 layers have an error bound of their own: compare without them
        fp8 = self.findings.numerics == "fp8"
        result = self._fused(fp8=not fp8)
        if self.exact:
            if self._deferred(result, expected):
                return expected
            same = equal(*self._with_caches(result, expected))
            if self.uninformative or not informative(*pytree.tree_leaves(expected)):
                return result if same else expected
            self.found.equal = same
            if not same:
                return self._without_sites_that_differ(expected, ahead)
            if self.record.same_strides and not same_strides(result, expected):
                work_ahead.forget()
                work_ahead.refuse(self.module)
                self._conclude(False, OTHER_STRIDES)
                return expected
            self._conclude(True)
            return result
        if informative(*pytree.tree_leaves(expected)):
            try:
                found = accuracy.errors(
                    self.module, self._again, self.args, self.kwargs, result, expected, eagerly
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
            self.uninformative.add("its result")
        if not fp8:
            return result
        result = expected = None
        return self._fused(noting=False)

    def _deferred(self, result: Any, expected: Any) -> bool:
        """Leave it to the end of the model's forward to ask whether the results are the same. If
        they turn out to differ, the next call looks for what differs."""
        # a recipe's block offers work to the next one with the very tensor that its kernels return
        if not self._is_recorded or self.key in self.record.differed or not comparisons.can_wait():
            return False
        flags = comparisons.flags_of(*self._with_caches(result, expected))
        strides = self.record.same_strides and not same_strides(result, expected)
        if flags is None or strides:
            return False
        work_ahead.returns_instead(result, expected)
        values = Uninformative()
        values.look_at("its result", pytree.tree_leaves(expected))
        found = comparisons.Deferred(flags, [self.uninformative, values], self._known)
        comparisons.defer(found)
        self.waits, self.args, self.kwargs = True, (), {}  # inputs are not kept alive
        self.caches = None
        return True

    def _known(self, same: bool, informative: bool) -> None:
        if not same:
            self.record.differed.add(self.key)
            leave_for_next_call(DIFFERED)
            return
        if informative:
            self.found.equal = True
            self._conclude(True)
        self.settled(self)

    def _without_sites_that_differ(self, expected: Any, ahead: bool) -> Any:
        """Find the sites that differ, leave them eager, and compare again."""
        work_ahead.forget()
        self.off = {}
        self._fused(comparing=True)
        result = self._fused(noting=False)
        if not equal(*self._with_caches(result, expected)):
            work_ahead.forget()
            work_ahead.refuse(self.module)
            self._conclude(False, f"its forward {DIFFERS}")
            return expected
        differs = any(DIFFERS in sites.values() for sites in self.off.values())
        problem = None
        if ahead and not differs:
            # no site of its own differs: the error is in what the previous block computed ahead
            work_ahead.refuse(self.module)
            problem = f"what the module before it computed ahead {DIFFERS}"
        self._conclude(True, problem)
        return result

    def _with_caches(self, result: Any, expected: Any) -> tuple[Any, Any]:
        """The results of both forwards with what they have written to caches."""
        if self.caches is None:
            return result, expected
        ours, theirs = self.caches.written()
        return (result, ours), (expected, theirs)

    def _again(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward once more, in the dtype of these inputs."""
        if self.caches is not None:
            leaves = pytree.tree_leaves((args, kwargs))
            like = (t.dtype for t in leaves if isinstance(t, Tensor) and t.is_floating_point())
            args, kwargs = self.caches.instead_in(args, kwargs, next(like, None))
        return self.eager(module, *args, **kwargs)

    def _eager(self) -> Any:
        return run_eager(self.module, self.eager, self.args, self.kwargs)

    def _fused(self, comparing: bool = False, fp8: bool = True, noting: bool = True) -> Any:
        notes: Counter[tuple[str, str]] = Counter()
        fields: dict[str, Any] = {"comparing": comparing, "fp8": fp8, "notes": None}
        fields["aside"] = self.caches is not None
        if noting:
            fields |= {"notes": notes, "uninformative": self.uninformative}
        given = (self.args, self.kwargs) if self.caches is None else self.caches.given()
        with set_mode(**fields):
            result = run_fused(self.module, self.record, self.key, self.off, self.fused, *given)
        self.notes = notes if noting else self.notes
        return result

    def _conclude(self, fused: bool, problem: str | None = None) -> None:
        off = {module: sites for module, sites in self.off.items() if sites}
        self.verdict = Verdict(fused, off)
        if fused and self.wanted:
            self.findings.proven.add(type(self.module))
        self.findings.add(self.module, self.inputs, self.notes, off, self.found, problem)
