"""First sight: a replaced forward and the module's own run side by side, and are compared.

`exact` compares every module at every new shape with `torch.equal`. The other tiers compare the
error of both against a float32 run of the same weights: one module of each class in the first
forward, and with `verify=True` every module at every new shape.

If a forward differs in `exact`, its fused sites are tried one by one, and those that differ stay
eager; if that does not mend it, or in another tier, the whole module does. Either gives a warning
and a line in the report.

A comparison may need more memory than there is. `exact` then leaves the module eager; the other
tiers go on without it. Either gives a warning and a line in the report, too.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import contract, handoff
from .check import DIFFERS, NO_MEMORY, NOTHING, Forward, current, eagerly, equal, set_now
from .signature import has_state, signature, written

# a service that sees ever new shapes starts over rather than grow
SIGNATURES, FINDINGS = 1024, 16384


@dataclass(frozen=True)
class Finding:
    """One module at one signature, as first seen."""

    module: str
    kind: str
    inputs: str
    sites: dict[tuple[str, str], int]  # how many places of a name met which fate
    equal: bool | None = None  # None: not compared bit for bit
    error: float | None = None
    eager_error: float | None = None
    problem: str | None = None  # why it stays eager
    unchecked: str | None = None  # why it does not, although it was not compared


@dataclass
class Checker:
    """The verdicts of one injection."""

    numerics: str
    verify: bool
    names: WeakKeyDictionary[nn.Module, str] = field(default_factory=WeakKeyDictionary)
    findings: deque[Finding] = field(default_factory=lambda: deque(maxlen=FINDINGS))
    # layers meant for eight bits that were called in a way that is not, and why
    misfits: WeakKeyDictionary[nn.Module, str] = field(default_factory=WeakKeyDictionary)
    _fused: WeakKeyDictionary[nn.Module, dict[Any, bool]] = field(default_factory=WeakKeyDictionary)
    _off: WeakKeyDictionary[nn.Module, dict[str, str]] = field(default_factory=WeakKeyDictionary)
    _proven: set[type] = field(default_factory=set)

    def run(self, module: nn.Module, fused: Forward, eager: Forward, args: Any, kwargs: Any) -> Any:
        """The forward of an injected module."""
        if current.eager:
            return eager(module, *args, **kwargs)
        if current.inside:
            return self._inside(module, fused, args, kwargs)
        seen = self._fused.get(module)
        if seen is None:
            seen = self._fused[module] = {}
        key = handoff.shared_key(module)
        if key is None:
            key = signature(args, kwargs)
        verdict = seen.get(key)
        if verdict is None:
            if len(seen) >= SIGNATURES:
                seen.clear()
            seen[key], result = self._first_sight(module, fused, eager, args, kwargs)
            return result
        return (self._inside if verdict else self._eager)(
            module, fused if verdict else eager, args, kwargs
        )

    def _inside(self, module: nn.Module, fused: Forward, args: Any, kwargs: Any) -> Any:
        before = current.inside, current.off
        current.inside, current.off = True, self._sites_off(module)
        try:
            return fused(module, *args, **kwargs)
        finally:
            current.inside, current.off = before

    def _sites_off(self, module: nn.Module) -> dict[str, str]:
        if current.notes is not None:
            return self._off.setdefault(module, {})
        return self._off.get(module, NOTHING) if self._off else NOTHING

    @staticmethod
    def _eager(module: nn.Module, eager: Forward, args: Any, kwargs: Any) -> Any:
        with eagerly():
            return eager(module, *args, **kwargs)

    def _first_sight(
        self, module: nn.Module, fused: Forward, eager: Forward, args: Any, kwargs: Any
    ) -> tuple[bool, Any]:
        """Whether the fused forward holds at this signature, and the result of this call."""
        exact = self.numerics == "exact"
        wanted = exact or self.verify or type(module) not in self._proven
        # what writes a cache or calls hooks is not run twice: its sites are tried one by one
        twice = wanted and not has_state(args, kwargs) and not _has_hooks(module)
        notes: Counter[tuple[str, str]] = Counter()
        random = Random(args, kwargs)
        ahead = handoff.waits_for(module)
        # layers in eight bits are held to a promise of their own
        apart = self.numerics == "fp8" and twice
        with set_now(notes=notes, comparing=exact and wanted and not twice, eight_bits=not apart):
            result = self._inside(module, fused, args, kwargs)
        facts: dict[str, Any] = {}
        good, problem = True, None
        if twice:
            try:
                good, result = self._compare(
                    module, fused, eager, args, kwargs, result, random, facts
                )
            except torch.OutOfMemoryError:
                if exact:
                    good, problem = False, NO_MEMORY
                else:
                    facts["unchecked"] = NO_MEMORY
        mended = good and facts.get("equal") is False
        if mended and ahead and DIFFERS not in self._sites_left_out(module).values():
            # it is right by itself: the module before it worked ahead wrongly
            handoff.refuse(module)
            problem = f"what the module before it laid ready {DIFFERS}"
        if not good:
            handoff.forget()
            handoff.refuse(module)
            problem = problem or (f"its forward {DIFFERS}" if exact else "its error is too large")
            result = None  # its memory may be needed now
            random.rewind()
            result = self._eager(module, eager, args, kwargs)
        elif wanted:
            self._proven.add(type(module))
        if apart and good:
            result = None
            random.rewind()
            result = self._inside(module, fused, args, kwargs)
        self._record(module, args, kwargs, notes, facts, problem)
        return good, result

    def _compare(
        self,
        module: nn.Module,
        fused: Forward,
        eager: Forward,
        args: Any,
        kwargs: Any,
        result: Any,
        random: Random,
        facts: dict[str, Any],
    ) -> tuple[bool, Any]:
        """Whether `result` keeps the promise, mended if need be; what was found goes to `facts`."""
        random.rewind()
        with torch.no_grad():
            expected = self._eager(module, eager, args, kwargs)
        if self.numerics == "exact":
            same = facts["equal"] = equal(result, expected)
            if same:
                return True, result
            return self._mend(module, fused, args, kwargs, expected, random)
        try:
            found = contract.errors(module, eager, args, kwargs, result, expected, eagerly)
        except contract.Unchecked as no:
            facts["unchecked"] = str(no)
            return True, result
        facts.update(found)
        return contract.holds(contract.rows(expected), **found), result

    def _mend(
        self, module: nn.Module, fused: Forward, args: Any, kwargs: Any, expected: Any, random: Any
    ) -> tuple[bool, Any]:
        """Find the sites that differ, leave them eager, and see whether the rest is right."""
        random.rewind()
        with set_now(comparing=True, notes=Counter()):
            self._inside(module, fused, args, kwargs)
        random.rewind()
        result = self._inside(module, fused, args, kwargs)
        return equal(result, expected), result

    def _sites_left_out(self, module: nn.Module) -> dict[str, str]:
        """The sites in a module and below it that stay eager, and why."""
        return {n: why for m in module.modules() for n, why in self._off.get(m, NOTHING).items()}

    def _record(
        self,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        notes: Counter[tuple[str, str]],
        facts: dict[str, Any],
        problem: str | None,
    ) -> None:
        off = self._sites_left_out(module)
        for inner in [m for m in module.modules() if not self._off.get(m, True)]:
            del self._off[inner]  # nothing is off there: later calls need not look
        for name, why in off.items():
            notes[name, why] = notes.pop((name, "fused"), 1)
        if different := sorted(name for name, why in off.items() if why == DIFFERS):
            problem = problem or f"{', '.join(different)} {DIFFERS}"
        kind, inputs = type(module).__name__, written(args, kwargs)
        name = self.names.get(module, f"a {kind}")
        self.findings.append(Finding(name, kind, inputs, dict(notes), problem=problem, **facts))
        if problem:
            warnings.warn(f"{name} at {inputs}: {problem}; that stays eager", stacklevel=6)
        elif unchecked := facts.get("unchecked"):
            text = f"{name} at {inputs} was not compared with eager: {unchecked}"
            warnings.warn(text, stacklevel=6)


def _has_hooks(module: nn.Module) -> bool:
    """Whether something inside a module is told when it runs."""
    return any(
        m._forward_hooks or m._forward_pre_hooks for m in module.modules() if m is not module
    )


class Random:
    """The state of the random generators before a forward, so that dropout repeats itself."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        devices = {
            t.device
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, Tensor) and t.is_cuda
        }
        self.cpu = torch.get_rng_state()
        self.cuda = [(d, torch.cuda.get_rng_state(d)) for d in devices]

    def rewind(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.cuda:
            torch.cuda.set_rng_state(state, device)
