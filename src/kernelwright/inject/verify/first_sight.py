"""First sight: a new forward and the module's own run side by side, and are compared.

`exact` compares every module at every new shape with `torch.equal`. The other tiers compare the
error of both against a float32 run of the same weights: one module of each class in the first
forward, and with `verify=True` every module at every new shape.

A verdict holds for one signature of the inputs, for the switches of the process and for the module
as it was (`State`). If any of them changes, the module is seen for the first time again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ...backends import torch_internals
from ...backends.torch_internals import dispatch_modes
from ..runtime import model_run, work_ahead
from ..runtime.input_key import on_meta, signature
from ..runtime.sites import Forward, current
from ..state.hooks import all_modules_hooked
from ..state.switches import switches
from .comparison import Comparison
from .findings import Evidence, Findings
from .running import run_eager, run_fused, run_nested
from .verdicts import ModuleRecord, Verdict

# a service that sees ever new shapes starts over rather than grow
MAX_SIGNATURES = 1024
# a person who turns something on and off comes back to a state
MAX_STATES = 4


@dataclass
class Checker(Findings):
    """The verdicts of one injection."""

    # restored: somebody may hold on to a forward of ours, and call it
    retired: bool = False
    # called with a module that is not what it was
    changed: Callable[[nn.Module], None] = lambda module: None
    _records: WeakKeyDictionary[nn.Module, list[ModuleRecord]] = field(
        default_factory=WeakKeyDictionary
    )

    def __deepcopy__(self, memo: Any) -> Checker:
        return self  # copies of a model share their forwards, too

    def run(self, module: nn.Module, fused: Forward, eager: Forward, args: Any, kwargs: Any) -> Any:
        """The forward of an injected module."""
        if current.eager or self.retired:
            return eager(module, *args, **kwargs)
        if current.inside and id(module) in current.members:
            return run_nested(module, fused, eager, args, kwargs)
        if looked_through():
            return run_eager(module, eager, args, kwargs)
        record = self._record(module, fused)
        if record.stays and id(module) in record.stays:
            self._say_once(module, record, args, kwargs)
            return eager(module, *args, **kwargs)
        key = self._key(module, args, kwargs)
        verdict = record.verdicts.get(key)
        if verdict is None:
            return self._first_sight(module, record, key, fused, eager, args, kwargs)
        if verdict.fused:
            return run_fused(module, record, key, verdict.off, fused, args, kwargs)
        return run_eager(module, eager, args, kwargs)

    def _key(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = work_ahead.shared_key(module)
        if key is None:
            key = signature(args, kwargs)
        outside = model_run.current.switches
        if outside is None:
            outside = switches(model_run.device_type(args, kwargs))
        return key, outside, work_ahead.is_offered(module)

    def _record(self, module: nn.Module, fused: Any) -> ModuleRecord:
        """What is known of a module as it is now."""
        known = self._records.get(module, [])
        serial = model_run.state_of(module)
        if known and serial and known[0].checked == serial:
            return known[0]
        found = next((r for r in known if r.state.holds(module)), None)
        if found is None:
            if known:
                self.proven.discard(type(module))
                self.changed(module)
                work_ahead.forget()  # it was made for what the module was
                work_ahead.allow(module)
            found = ModuleRecord.of(module, fused)
        if not known or found is not known[0]:
            others = [r for r in known if r is not found]
            self._records[module] = [found, *others[: MAX_STATES - 1]]
            if found in known:  # it has come back to this state
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
        """The result of a call for which there is no verdict, which is found if it can be."""
        if on_meta(args, kwargs) or dispatch_modes():
            return run_eager(module, eager, args, kwargs)
        comparison = Comparison(self, module, record, key, fused, eager, args, kwargs)
        # another thread may see it for the first time, too, and be done at any moment
        count = record.untold[key] = record.untold.get(key, 0) + 1
        again = count & (count - 1)
        if again and not comparison.records_gradients:  # not at every call
            return run_eager(module, eager, args, kwargs)
        result = comparison.run()
        if comparison.verdict is not None:
            if len(record.verdicts) >= MAX_SIGNATURES:
                record.verdicts.clear()
            record.verdicts[key] = comparison.verdict
            record.untold.pop(key, None)
            self.untold.pop(module, None)
        elif comparison.untold:
            self.untold[module] = True
        return result

    def _say_once(self, module: nn.Module, record: ModuleRecord, args: Any, kwargs: Any) -> None:
        if None not in record.verdicts:
            record.verdicts[None] = Verdict(False)
            notes = Counter({("forward", record.stays[id(module)]): 1})
            self.add(module, args, kwargs, notes, {}, Evidence())


def looked_through() -> bool:
    """Whether something takes every operation apart that no kernel of ours can be taken apart for:
    function transforms, forward-mode gradients, tracing, hooks on all modules."""
    return (
        torch_internals.in_functorch()
        or torch_internals.in_forward_ad()
        or torch_internals.in_jit_trace()
        or all_modules_hooked()
    )
