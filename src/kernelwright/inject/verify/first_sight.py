"""First sight: a replaced forward and the module's own run side by side, and are compared.

`exact` compares every module at every new shape with `torch.equal`. The other tiers compare the
error of both against a float32 run of the same weights: one module of each class in the first
forward, and with `verify=True` every module at every new shape.

A verdict holds for one signature of the inputs, for the switches of the process and for the module
as it was (`State`). If any of them changes, the module is seen for the first time again.

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

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ..runtime import forwards, model_run, random_draws, work_ahead
from ..runtime.input_key import facts, has_state, on_meta, signature, written
from ..runtime.sites import (
    DIFFERS,
    HERE,
    NO_MEMORY,
    NOTHING,
    Forward,
    NotHere,
    current,
    declined,
    eagerly,
    equal,
    set_now,
    tells,
)
from ..state.module_state import State, all_modules_hooked, base_layers, memory_of
from ..state.switches import switches
from . import accuracy

# a service that sees ever new shapes starts over rather than grow
SIGNATURES, FINDINGS = 1024, 16384
# a person who turns something on and off comes back to a state
STATES = 4
_numbers = count(1)


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


@dataclass(frozen=True)
class Verdict:
    """Whether a module runs fused, and which sites in it and below it do not."""

    fused: bool
    off: dict[int, dict[str, str]] = field(default_factory=dict)


@dataclass(eq=False)
class _Record:
    """A module in one state, and the verdicts on it."""

    state: State
    once: str | None  # why it must not be run twice
    members: frozenset[int]  # injected modules that it is about: it and those in it, by id
    unknown: bool  # whether some of its code is not what a recipe was written after
    stays: dict[int, str]  # modules in it that are not what their recipe is for, by id
    adapted: set[int]  # layers in it with an adapter around them, by id
    checked: int = 0  # the state of the whole model in which this one was last found unchanged
    serial: int = field(default_factory=_numbers.__next__)
    verdicts: dict[Any, Verdict] = field(default_factory=dict)
    # how often a signature came whose values told nothing
    untold: Counter[Any] = field(default_factory=Counter)


@dataclass
class _Facts:
    """What a comparison found."""

    equal: bool | None = None
    error: float | None = None
    eager_error: float | None = None
    unchecked: str | None = None


@dataclass
class Checker:
    """The verdicts of one injection."""

    numerics: str
    verify: bool
    # restored: somebody may hold on to a forward of ours, and call it
    retired: bool = False
    names: WeakKeyDictionary[nn.Module, str] = field(default_factory=WeakKeyDictionary)
    findings: deque[Finding] = field(default_factory=lambda: deque(maxlen=FINDINGS))
    # layers meant for eight bits that were called in a way that is not, and why
    misfits: WeakKeyDictionary[nn.Module, str] = field(default_factory=WeakKeyDictionary)
    # modules whose inputs have told nothing so far
    untold: WeakKeyDictionary[nn.Module, bool] = field(default_factory=WeakKeyDictionary)
    # called with a module that is not what it was
    changed: Callable[[nn.Module], None] = lambda module: None
    _records: WeakKeyDictionary[nn.Module, list[_Record]] = field(default_factory=WeakKeyDictionary)
    _proven: set[type] = field(default_factory=set)

    def __deepcopy__(self, memo: Any) -> Checker:
        return self  # copies of a model share their forwards, too

    def run(self, module: nn.Module, fused: Forward, eager: Forward, args: Any, kwargs: Any) -> Any:
        """The forward of an injected module."""
        if current.eager or self.retired:
            return eager(module, *args, **kwargs)
        if current.inside and id(module) in current.members:
            return self._nested(module, fused, eager, args, kwargs)
        if looked_through():
            return self._eager(module, eager, args, kwargs)
        record = self._record(module, fused)
        if record.stays and id(module) in record.stays:
            self._say_once(module, record, args, kwargs)
            return eager(module, *args, **kwargs)
        key = self._key(module, args, kwargs)
        verdict = record.verdicts.get(key)
        if verdict is None:
            return self._first_sight(module, record, key, fused, eager, args, kwargs)
        if verdict.fused:
            return self._fused(module, record, key, verdict.off, fused, args, kwargs)
        return self._eager(module, eager, args, kwargs)

    def _key(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = work_ahead.shared_key(module)
        if key is None:
            key = signature(args, kwargs)
        outside = model_run.current.switches
        if outside is None:
            outside = switches(model_run.device_type(args, kwargs))
        return key, outside, work_ahead.is_offered(module)

    def _record(self, module: nn.Module, fused: Any) -> _Record:
        """What is known of a module as it is now."""
        known = self._records.get(module, [])
        serial = model_run.state_of(module)
        if known and serial and known[0].checked == serial:
            return known[0]
        found = next((r for r in known if r.state.holds(module)), None)
        if found is None:
            if known:
                self._proven.discard(type(module))
                self.changed(module)
                work_ahead.forget()  # it was made for what the module was
                work_ahead.allow(module)
            ours = [(module, fused), *_injected_in(module)]
            found = _Record(
                State(module, adapters=False),
                memory_of(module),
                frozenset(id(m) for m, _ in ours),
                any(not forward.known for _, forward in ours),
                _strangers(ours),
                base_layers(module),
            )
        if not known or found is not known[0]:
            others = [r for r in known if r is not found]
            self._records[module] = [found, *others[: STATES - 1]]
            if found in known:  # it has come back to this state
                self.changed(module)
                work_ahead.forget()
        found.checked = serial
        return found

    def _fused(
        self,
        module: nn.Module,
        record: _Record,
        key: Any,
        off: dict[int, dict[str, str]],
        fused: Forward,
        args: Any,
        kwargs: Any,
    ) -> Any:
        now, noting = current, current.notes is not None
        before = {name: getattr(now, name) for name in HERE}
        now.inside, now.off_inside, now.stays, now.members = True, off, record.stays, record.members
        now.adapted, now.made_under = record.adapted, (record.serial, key)
        now.off = off.setdefault(id(module), {}) if noting else off.get(id(module), NOTHING)
        try:
            return fused(module, *args, **kwargs)
        finally:
            for name, value in before.items():
                setattr(now, name, value)

    @staticmethod
    def _nested(module: nn.Module, fused: Forward, eager: Forward, args: Any, kwargs: Any) -> Any:
        """A forward of ours that another one of ours calls."""
        if current.stays and id(module) in current.stays:
            declined("forward", current.stays[id(module)])
            return eager(module, *args, **kwargs)
        before, inside = current.off, current.off_inside
        if current.notes is not None:
            current.off = inside.setdefault(id(module), {})  # type: ignore[attr-defined]
        else:
            current.off = inside.get(id(module), NOTHING) if inside else NOTHING
        try:
            return fused(module, *args, **kwargs)
        finally:
            current.off = before

    @staticmethod
    def _eager(module: nn.Module, eager: Forward, args: Any, kwargs: Any) -> Any:
        with eagerly():
            return eager(module, *args, **kwargs)

    def _first_sight(
        self,
        module: nn.Module,
        record: _Record,
        key: Any,
        fused: Forward,
        eager: Forward,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """The result of a call for which there is no verdict, which is found if it can be."""
        if on_meta(args, kwargs) or torch._C._len_torch_dispatch_stack():
            return self._eager(module, eager, args, kwargs)
        sight = _Sight(self, module, record, key, fused, eager, args, kwargs)
        # another thread may see it for the first time, too, and be done at any moment
        count = record.untold[key] = record.untold.get(key, 0) + 1
        again = count & (count - 1)
        if again and not sight.records_gradients:  # not at every call
            return self._eager(module, eager, args, kwargs)
        result = sight.look()
        if sight.verdict is not None:
            if len(record.verdicts) >= SIGNATURES:
                record.verdicts.clear()
            record.verdicts[key] = sight.verdict
            record.untold.pop(key, None)
            self.untold.pop(module, None)
        elif sight.untold:
            self.untold[module] = True
        return result

    def _say_once(self, module: nn.Module, record: _Record, args: Any, kwargs: Any) -> None:
        if None not in record.verdicts:
            record.verdicts[None] = Verdict(False)
            notes = Counter({("forward", record.stays[id(module)]): 1})
            self.report(module, args, kwargs, notes, {}, _Facts())

    def report(
        self,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        notes: Counter[tuple[str, str]],
        off: dict[int, dict[str, str]],
        found: _Facts,
        problem: str | None = None,
    ) -> None:
        left_out = {name: why for sites in off.values() for name, why in sites.items()}
        for name, why in left_out.items():
            notes[name, why] = notes.pop((name, "fused"), 1)
        if different := sorted(name for name, why in left_out.items() if why == DIFFERS):
            problem = problem or f"{', '.join(different)} {DIFFERS}"
        kind, inputs = type(module).__name__, written(args, kwargs)
        name = self.names.get(module, f"a {kind}")
        self.findings.append(
            Finding(name, kind, inputs, dict(notes), problem=problem, **vars(found))
        )
        if problem:
            warnings.warn(f"{name} at {inputs}: {problem}; that stays eager", stacklevel=8)
        elif found.unchecked:
            text = f"{name} at {inputs} was not compared with eager: {found.unchecked}"
            warnings.warn(text, stacklevel=8)


@dataclass
class _Sight:
    """One module at one signature, seen for the first time."""

    checker: Checker
    module: nn.Module
    record: _Record
    key: Any
    fused: Forward
    eager: Forward
    args: Any
    kwargs: Any
    verdict: Verdict | None = None  # stays None if the values told nothing, or it has a memory
    untold: set[str] = field(default_factory=set)
    found: _Facts = field(default_factory=_Facts)
    notes: Counter[tuple[str, str]] = field(default_factory=Counter)
    off: dict[int, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.records_gradients = _records_gradients(self.module, self.args, self.kwargs)

    def look(self) -> Any:
        checker = self.checker
        self.exact = checker.numerics == "exact"
        self.wanted = self.exact or checker.verify or type(self.module) not in checker._proven
        once = self.record.once or has_state(self.args, self.kwargs)
        if once or not self.wanted or self.records_gradients:
            return self._in_one_run()
        return self._side_by_side()

    def _in_one_run(self) -> Any:
        """Run fused, in `exact` with each site beside its eager steps."""
        if self.record.unknown and (self.wanted or self.record.once):
            self._conclude(False, "its code is new to us, and it cannot be run twice")
            return self._eager()
        if self.exact and torch._C._is_any_autocast_enabled():
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
        apart = self.checker.numerics == "fp8"
        result = self._fused(eight_bits=not apart)
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
        return self.checker._eager(self.module, self.eager, self.args, self.kwargs)

    def _fused(self, comparing: bool = False, eight_bits: bool = True, noting: bool = True) -> Any:
        notes: Counter[tuple[str, str]] = Counter()
        how: dict[str, Any] = {"comparing": comparing, "eight_bits": eight_bits}
        how |= {"notes": notes, "untold": self.untold} if noting else {"notes": None}
        with set_now(**how):
            result = self.checker._fused(
                self.module, self.record, self.key, self.off, self.fused, self.args, self.kwargs
            )
        self.notes = notes if noting else self.notes
        return result

    def _conclude(self, fused: bool, problem: str | None = None) -> None:
        off = {module: sites for module, sites in self.off.items() if sites}
        self.verdict = Verdict(fused, off)
        if fused and self.wanted:
            self.checker._proven.add(type(self.module))
        self.checker.report(
            self.module, self.args, self.kwargs, self.notes, off, self.found, problem
        )


def _records_gradients(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether autograd records this call. Memory then allows one run, and a checkpointed block must
    save the same tensors when it is run again in the backward."""
    if not torch.is_grad_enabled():
        return False
    leaves = (*pytree.tree_leaves((args, kwargs)), *module.parameters())
    return any(isinstance(t, Tensor) and t.requires_grad for t in leaves)


def looked_through() -> bool:
    """Whether something takes every operation apart that no kernel of ours can be taken apart for:
    function transforms, forward-mode gradients, tracing, hooks on all modules."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or all_modules_hooked()
    )


def _injected_in(root: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """The injected modules inside a module, and their fused forwards. One around whose forward
    somebody has put another is not among them: it looks for itself when it is called."""
    for module in root.modules():
        forward: Any = forwards.current(module)
        fused = None if forward is None else getattr(forward.__func__, "fused", None)
        if fused is not None and module is not root:
            yield module, fused


def _strangers(injected: list[tuple[nn.Module, Any]]) -> dict[int, str]:
    """Injected modules that are not, or no longer, what their recipe is for."""
    found = {}
    for module, fused in injected:
        if forwards.class_forward(module, fused.own) is not fused.own:
            found[id(module)] = "its class has another forward now"
        elif fused.known and not fused.patch.is_written_for(type(module)):
            found[id(module)] = "the code that its recipe was written after was replaced"
        elif (why := fused.patch.matches(module)) is not True:
            found[id(module)] = why or "it is no longer what its recipe is for"
    return found
