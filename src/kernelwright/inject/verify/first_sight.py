"""First sight: a new forward runs beside the module's own, and the results are compared.

`exact` compares every module at every new shape with `torch.equal`. The other tiers compare the
error of both against a float32 run of the same weights: one module of each class in the first
forward, and with `verify=True` every module at every new shape.

A module that has been compared runs its own forward at the first call with a further shape, and is
compared at the second: many a shape comes once, as that of most prompts of a language model, and
then a comparison, and recording a block before it, would take longer than it could save.

A verdict holds for one signature of the inputs, one setting of PyTorch's switches and one state of
the module (`State`). If any of them changes, there is another first sight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ...backends.torch_internals import dispatch_modes, needs_torch_ops
from ..graphs.capture import capturing, leave_for_next_call
from ..graphs.host_reads import reading
from ..runtime import model_run, work_ahead
from ..runtime.gradients import gives_gradients, records_gradients
from ..runtime.input_key import in_words, number_of, on_meta, signature
from ..runtime.sites import Forward, mode
from ..state.switches import switches
from .comparison import Comparison
from .findings import NO_BACKWARD, Evidence, Findings
from .running import run_eager, run_fused, run_nested
from .verdicts import ModuleRecord, Verdict

# verdicts per module: a service that keeps getting new shapes must not grow without bound
MAX_SIGNATURES = 1024
POSTPONED = "a further shape is compared first"
# states kept per module: users who toggle a setting come back to an earlier one
MAX_STATES = 4


@dataclass
class Checker(Findings):
    """The verdicts of one injection."""

    # set by restore: others may still hold a forward of ours, and call it
    retired: bool = False
    # called with a module whose state has changed
    changed: Callable[[nn.Module], None] = lambda module: None
    # runs a module of which autograd keeps a record: (module, its own forward, args, kwargs)
    training: Callable[[nn.Module, Forward, Any, Any], Any] | None = None
    # called with a module before its own forward runs with gradients: it reads all its weights
    fetch_weights: Callable[[nn.Module], None] = lambda module: None
    _records: WeakKeyDictionary[nn.Module, list[ModuleRecord]] = field(
        default_factory=WeakKeyDictionary
    )

    def __deepcopy__(self, memo: Any) -> Checker:
        return self  # copies of a model share their forwards, too

    def run(self, module: nn.Module, fused: Forward, eager: Forward, args: Any, kwargs: Any) -> Any:
        """The forward of an injected module: fused, eager, or both at first sight."""
        if mode.eager or self.retired:
            return eager(module, *args, **kwargs)
        if mode.inside and id(module) in mode.members:
            return run_nested(module, fused, eager, args, kwargs)
        if needs_torch_ops():
            return run_eager(module, eager, args, kwargs)
        if gives_gradients(args, kwargs):
            return self._with_gradients(module, eager, args, kwargs)
        record = self._record(module, fused)
        if records_gradients(record.parameters):
            return self._with_gradients(module, eager, args, kwargs)
        if record.excluded and id(module) in record.excluded:
            self._report_once(module, record, args, kwargs)
            return eager(module, *args, **kwargs)
        key = self._key(module, fused, args, kwargs)
        verdict = record.verdicts.get(key)
        if verdict is None:
            return self._first_sight(module, record, key, fused, eager, args, kwargs)
        if verdict.fused:
            return run_fused(module, record, key, verdict.off, fused, args, kwargs)
        return run_eager(module, eager, args, kwargs)

    def _with_gradients(self, module: nn.Module, eager: Forward, args: Any, kwargs: Any) -> Any:
        """The result of a call of which autograd keeps a record. The new forward is not used: the
        gradients of its kernels are not those of eager's chain of ops."""
        self.fetch_weights(module)
        if self.training is not None:
            return self.training(module, eager, args, kwargs)
        self.gradients[type(module).__name__, NO_BACKWARD] = 1
        return run_eager(module, eager, args, kwargs)

    def _key(self, module: nn.Module, fused: Any, args: Any, kwargs: Any) -> Any:
        own = fused.patch.signature
        if own is not None:
            key = own(args, kwargs)
        elif (key := work_ahead.shared_key(module)) is not None:
            # whether a block is given a mask may depend on the values of the model's inputs
            key = key, *map(type, args), *map(type, kwargs.values())
        if key is None:
            key = signature(args, kwargs)
        outside = model_run.active.switches
        if outside is None:
            outside = number_of(switches(model_run.device_type(args, kwargs)))
        # a recorded block compares itself what was done ahead for it
        return key, outside, own is None and work_ahead.is_offered(module)

    def _record(self, module: nn.Module, fused: Any) -> ModuleRecord:
        """The record of a module in its current state."""
        known = self._records.get(module, [])
        serial = model_run.state_of(module)
        if known and serial and known[0].checked == serial:
            return known[0]
        found = next((r for r in known if r.state.holds(module)), None)
        if found is None:
            if known:
                self.proven.discard(type(module))
                self.changed(module)
                work_ahead.forget()  # it was computed for the module's old state
                work_ahead.allow(module)
            found = ModuleRecord.of(module, fused)
        if not known or found is not known[0]:
            others = [r for r in known if r is not found]
            self._records[module] = [found, *others[: MAX_STATES - 1]]
            if found in known:  # the module is back in an earlier state
                self.changed(module)
                work_ahead.forget()
        found.checked = serial
        return found

    def _first_sight(
        self,
        module: nn.Module,
        record: ModuleRecord,
        key: Any,
        fused: Forward,
        eager: Forward,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """The result of a call that has no verdict yet; finds one if possible."""
        # a comparison reads values on the host, which is no part of a graph
        captured = capturing() or reading()
        if captured or on_meta(args, kwargs) or dispatch_modes():
            return run_eager(module, eager, args, kwargs)
        if self._comes_once_so_far(record, key, fused):
            leave_for_next_call(POSTPONED)
            self.postponed[module] = True
            return run_eager(module, eager, args, kwargs)
        if fused.patch.signature is not None:  # type: ignore[attr-defined]
            work_ahead.forget()  # it is compared alone first
        settle = partial(self._settle, module, record, key)
        comparison = Comparison(self, module, record, key, fused, eager, args, kwargs, settle)
        # `get`: another thread may finish its own first sight, and remove the entry, at any moment
        count = record.uninformative[key] = record.uninformative.get(key, 0) + 1
        # values that proved nothing may go on doing so: compare at calls 1, 2, 4, 8, ... only
        if count & (count - 1):
            return run_eager(module, eager, args, kwargs)
        result = comparison.run()
        if not comparison.waits:
            settle(comparison)
        return result

    def _settle(
        self, module: nn.Module, record: ModuleRecord, key: Any, comparison: Comparison
    ) -> None:
        """Take over what a comparison has found."""
        if comparison.verdict is not None:
            if len(record.verdicts) >= MAX_SIGNATURES:
                record.verdicts.clear()
            record.verdicts[key] = comparison.verdict
            record.uninformative.pop(key, None)
            record.differed.discard(key)
            record.declined.discard(key)
            self.uninformative.pop(module, None)
            self.postponed.pop(module, None)
        elif comparison.uninformative:
            self.uninformative[module] = True

    def _comes_once_so_far(self, record: ModuleRecord, key: Any, fused: Any) -> bool:
        """Whether inputs of this signature come for the first time to a module that was compared
        at others. What takes no comparison and no recording need not wait."""
        if self.numerics != "exact" and fused.patch.signature is None:
            return False
        signed, *_ = key
        if signed in record.came:
            return False
        if len(record.came) >= MAX_SIGNATURES:
            record.came.clear()
        record.came.add(signed)
        return bool(record.verdicts)

    def _report_once(self, module: nn.Module, record: ModuleRecord, args: Any, kwargs: Any) -> None:
        if None not in record.verdicts:
            record.verdicts[None] = Verdict(False)
            notes = Counter({("forward", record.excluded[id(module)]): 1})
            self.add(module, in_words(args, kwargs), notes, {}, Evidence())
