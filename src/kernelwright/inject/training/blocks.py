"""Which blocks run as programs while gradients are recorded.

A block is compared with autograd once for each state, layout of its inputs and set of wanted
gradients: its own forward and backward run beside the programs, on its own numbers and random
gradients (random numbers too where its own are zeros, such as a new LoRA: zeros would prove
nothing). Results and gradients must have the same bits; otherwise the block runs as without
injection, and the report says why.

The layout of the gradients that a backward is given is not known before. It is taken to be that of
the results; where that was wrong, autograd finds the gradients of that call, and the next forward
is prepared for those. Under gradient checkpointing a forward that will run again has to save then
what it saved at first: nothing changes while one waits for that.

At a further shape a block runs as without injection until that has come WAITS times: the lengths of
texts are as good as random, and recording and comparing take longer than a few steps save.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...backends.torch_internals import (
    any_autocast,
    dispatch_modes,
    in_backward,
    keeps_graph,
    pytree,
    saves_through_hooks,
)
from ...backends.user_warnings import warn
from ...errors import in_one_line
from ...fuser.cache_recording import UNTOUCHED
from ...fuser.index import CannotIndex
from ...fuser.joint_recording import Call, record_joint
from ...fuser.module_twin import twin_of
from ...fuser.recording import CannotRecord, paths_of
from ...library_internals import is_kv_cache, is_shared_states
from ..graphs.capture import capturing
from ..graphs.host_reads import reading
from ..identify.structure import structure_of
from ..reuse.programs import MAX_RECORDINGS, places_of
from ..reuse.recordable import little_to_gain, shapes, signature, unknown_constant, waits, why_not
from ..runtime import model_run
from ..runtime.input_key import WRITES_TO_INPUT, is_plain, number_of, on_meta
from ..runtime.sites import Forward, eagerly
from ..state.module_state import State
from ..state.switches import switches
from ..verify.findings import EAGER, NO_BACKWARD, Findings
from ..verify.running import run_eager
from .block_graph import Layouts, layouts_of
from .block_programs import BlockPrograms, BoundBlock
from .graphs import TrainingGraphs
from .trial import Trial

# gradients of another layout than expected, after which a block runs as without injection
MAX_SURPRISES = 4
# calls for which a block without programs is left alone: looking whether it has changed takes the
# host as long as its own forward
LEFT_ALONE = 64
# calls at a further shape before a block is compared at it
WAITS = 8
NOT_LOOKED_AT = f"{EAGER}: not looked at in this call"
AS_BEFORE = f"{EAGER}: so did the forward that checkpointing runs again"
CACHED = "it is given a key-value cache"
WAITING = f"{EAGER}: a further shape, until it has come {WAITS} times"


@dataclass(eq=False)
class _Reruns:
    """Forwards that gradient checkpointing may run again. Each has to save then what it saved at
    first: how a block runs changes only while none waits. Hooks on what autograd saves do not say
    whether they run anything again: under those that do not, nothing changes any more."""

    waiting: int = 0

    def none_waits(self) -> bool:
        """Count a call; whether none waited before it."""
        hooked, none = saves_through_hooks(), self.waiting == 0
        if not (hooked and in_backward()):
            self.waiting += hooked
        elif not none and not keeps_graph():
            self.waiting -= 1
        return none


@dataclass(eq=False)
class _Seen:
    """One block at one signature."""

    expected: Layouts | None = None  # of the gradients; None: as of the results
    layouts: Layouts | None = None  # what was expected when it ran last
    surprises: int = 0
    # of the contributions to each input, by number: see BoundBlock
    most: Counter[int] = field(default_factory=Counter)
    bound: dict[Layouts | None, BoundBlock | str] = field(default_factory=dict)
    as_programs: bool = False  # how it ran last
    reruns: _Reruns = field(default_factory=_Reruns)

    def surprised(self, layouts: Layouts) -> None:
        """Expect these layouts from now on."""
        self.surprises += 1
        self.expected = layouts


@dataclass(eq=False)
class _Block:
    """One block in one state."""

    state: State
    parameters: list[dict[str, Any]]  # of the modules in it, as they hold them
    serial: int = 0  # of the state of the model in which it was last found unchanged
    left_alone: int = 0  # for how many more calls
    reruns: _Reruns = field(default_factory=_Reruns)  # of forwards while it was left alone
    why_left_alone: str = ""
    seen: dict[Any, _Seen] = field(default_factory=dict)
    shapes: set[Any] = field(default_factory=set)  # that it was compared at
    calls: Counter[Any] = field(default_factory=Counter)  # at other shapes

    @staticmethod
    def of(module: nn.Module) -> _Block:
        return _Block(State(module), [m._parameters for m in module.modules() if m._parameters])


@dataclass(eq=False)
class Training:
    """How the blocks of one injection run while gradients are recorded."""

    findings: Findings
    fell_back: Counter[tuple[str, str]]
    kinds: tuple[type[nn.Module], ...] = ()  # classes of blocks
    graphs: TrainingGraphs | None = None
    warned: bool = False  # that a model is trained with a key-value cache
    _known: WeakKeyDictionary[nn.Module, _Block] = field(default_factory=WeakKeyDictionary)
    _shared: dict[Any, BlockPrograms | str] = field(default_factory=dict)

    def __call__(self, module: nn.Module, eager: Forward, args: Any, kwargs: Any) -> Any:
        """The result of a call of which autograd keeps a record."""
        found = self._programs(module, *_without_shared_states(args, kwargs))
        if isinstance(found, BoundBlock):
            return found(args, kwargs)
        if self.graphs is not None and found not in (NO_BACKWARD, NOT_LOOKED_AT):
            self.graphs.refuse(found)
        return run_eager(module, eager, args, kwargs)

    def _programs(self, module: nn.Module, args: Any, kwargs: Any) -> BoundBlock | str:
        """What a call runs as, or why it runs the block's own forward."""
        if why := self._why_not_now(module):
            self.findings.gradients[type(module).__name__, why] = 1
            return why
        known = self._known.get(module)
        if known is not None and (known.left_alone > 0 or known.reruns.waiting):
            known.left_alone -= known.reruns.none_waits()
            return known.why_left_alone
        seen = self._seen(module, args, kwargs)
        changes = seen.reruns.none_waits()
        if not (changes or seen.as_programs):
            return AS_BEFORE
        if changes:
            seen.layouts = seen.expected
        found = seen.bound.get(seen.layouts)
        if found is None:
            if capturing() or reading() or on_meta(args, kwargs):
                # a comparison is no part of a graph, and meta tensors have no values to compare
                return NOT_LOOKED_AT
            if changes and self._waits(module, shapes(args, kwargs)):
                return WAITING
            found = seen.bound[seen.layouts] = self._bind(module, args, kwargs, seen)
            self.findings.gradients[type(module).__name__, str(found)] += 1
        block = self._known[module]
        if isinstance(found, str) and not any(s.as_programs for s in block.seen.values()):
            block.left_alone, block.why_left_alone = LEFT_ALONE, found
        if seen.surprises > MAX_SURPRISES and changes and isinstance(found, BoundBlock):
            found = f"{EAGER}: gradients of another layout at every step"
            self.findings.gradients[type(module).__name__, found] = 1
        seen.as_programs = isinstance(found, BoundBlock)
        return found

    def _why_not_now(self, module: nn.Module) -> str | None:
        if not isinstance(module, self.kinds):
            return NO_BACKWARD
        if any_autocast():
            return f"{EAGER}: autocast"
        if dispatch_modes():
            return f"{EAGER}: something sees every operation"
        return None

    def _seen(self, module: nn.Module, args: Any, kwargs: Any) -> _Seen:
        known, serial = self._known.get(module), model_run.state_with_adapters(module)
        if known is None or not ((serial and serial == known.serial) or known.state.holds(module)):
            if known is not None and self.graphs is not None:
                self.graphs.forget(module)
            known = self._known[module] = _Block.of(module)
        known.serial = serial
        outside = model_run.active.switches
        if outside is None:
            outside = number_of(switches(model_run.device_type(args, kwargs)))
        key = (
            signature(args, kwargs),
            wanted_of((args, kwargs)),
            [p is not None and p.requires_grad for d in known.parameters for p in d.values()],
            outside,
            torch.are_deterministic_algorithms_enabled(),
        )
        number = number_of((*key[:2], tuple(key[2]), *key[3:]))
        found = known.seen.get(number)
        if found is None:
            if len(known.seen) >= MAX_RECORDINGS:
                known.seen.clear()
            found = known.seen[number] = _Seen()
        return found

    def _waits(self, module: nn.Module, shape: Any) -> bool:
        """Whether a block that has no programs at this shape is not compared at it yet."""
        block = self._known[module]
        if block.shapes and shape not in block.shapes:
            if len(block.calls) >= MAX_RECORDINGS:
                block.calls.clear()
            block.calls[shape] += 1
            if block.calls[shape] <= WAITS:
                self.findings.postponed[module] = True
                return True
            del block.calls[shape]
        block.shapes.add(shape)
        self.findings.postponed.pop(module, None)
        return False

    def _bind(self, module: nn.Module, args: Any, kwargs: Any, seen: _Seen) -> BoundBlock | str:
        """Programs that were compared for this block, or why it has none."""
        why = why_not(module, ())
        if why is None and _may_write(args, kwargs):
            cached = any(map(is_kv_cache, (*args, *kwargs.values())))
            why = CACHED if cached else WRITES_TO_INPUT
            if cached and not self.warned:
                self.warned = True
                warn(
                    f"{type(module).__name__} {EAGER} while gradients are recorded: {CACHED}; pass "
                    f"use_cache=False to train, or call the model under torch.no_grad()"
                )
        if why is None and any(_is_inference(t) for t in pytree.tree_leaves((args, kwargs))):
            why = "an input that was made in inference mode"  # autograd may not keep it
        if why is None and waits(module):
            why = "it waits for other processes"
        if why is not None:
            return f"{EAGER}: {why}"
        try:
            with eagerly(), saved_tensors_hooks(_as_it_is, _as_it_is):
                return self._compared(module, args, kwargs, seen)
        except (CannotRecord, CannotIndex) as no:
            return f"{EAGER}: {no}"
        except torch.OutOfMemoryError:
            return f"{EAGER}: not enough memory to compare"
        except Exception as error:
            return f"{EAGER}: its programs failed ({in_one_line(error)})"

    def _compared(self, module: nn.Module, args: Any, kwargs: Any, seen: _Seen) -> BoundBlock | str:
        twin = twin_of(module)
        call, tensors = Call.of(twin, args, kwargs)
        for t in tensors:
            if type(t) not in (Tensor, nn.Parameter, nn.Buffer):
                raise CannotRecord(f"a tensor of the class {type(t).__name__}")
        if len(set(map(id, tensors))) < len(tensors):  # copies of it are not one tensor
            raise CannotRecord("one tensor is given twice")
        key = (
            structure_of(module),
            signature(args, kwargs),
            tuple(call.wanted),
            number_of(switches(model_run.device_type(args, kwargs))),
            torch.are_deterministic_algorithms_enabled(),
            seen.layouts,
        )
        shared = self._shared.get(key)
        if isinstance(shared, str):
            return shared
        trial = Trial.of(twin, call, tensors, seen.layouts, rehearsed=shared is not None)
        if not trial.expected.contributions:
            return f"{EAGER}: nothing in it has a gradient"
        if shared is None:
            try:
                joint = record_joint(twin, call, trial.values, trial.gradients)
            except CannotRecord as no:
                self._shared[key] = f"{EAGER}: {no}"  # for all blocks of its structure
                raise
            if why := unknown_constant(module, joint):
                raise CannotRecord(why)
            device = next((t.device for t in trial.values if t.is_cuda), None)
            shared = BlockPrograms.of(
                type(module).__name__,
                joint,
                trial.differentiable,
                layouts_of(trial.gradients),
                device,
                self.fell_back,
            )
            few = little_to_gain(shared.ops, shared.kernels)
            if not joint.constants:
                if len(self._shared) >= MAX_RECORDINGS:
                    self._shared.clear()
                self._shared[key] = f"{EAGER}: {few}" if few else shared
            if few:
                return f"{EAGER}: {few}"
        places, paths = places_of(module, call.names), paths_of((args, kwargs))
        seen.most |= Counter(shared.joint.contributions)  # at first all results have gradients
        bound = BoundBlock(
            *(shared, ref(module), call, places, paths, seen.surprised, seen.most.copy()),
            graphs=self.graphs,
        )
        problem = trial.problem(bound)
        return bound if problem is None else f"{EAGER}: {problem}"


def wanted_of(value: Any) -> Any:
    """Of which of the tensors in some arguments a gradient is wanted, and which autograd may not
    keep."""
    if isinstance(value, Tensor):
        return "inference" if value.is_inference() else value.requires_grad
    if isinstance(value, (tuple, list)):
        return tuple(map(wanted_of, value))
    return tuple(map(wanted_of, value.values())) if isinstance(value, dict) else None


def _is_inference(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_inference()


def _as_it_is(t: Tensor) -> Tensor:
    return t


def _without_shared_states(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Inputs with nothing in the place of states that layers share: programs do not touch them. In
    gradient checkpointing a layer finds other states when it runs again than it did at first."""
    if not any(map(is_shared_states, (*args, *kwargs.values()))):
        return args, kwargs
    instead = [UNTOUCHED if is_shared_states(v) else v for v in args]
    named = {name: UNTOUCHED if is_shared_states(v) else v for name, v in kwargs.items()}
    return tuple(instead), named


def _may_write(args: Any, kwargs: Any) -> bool:
    return not all(is_plain(v) or v is UNTOUCHED for v in (*args, *kwargs.values()))
