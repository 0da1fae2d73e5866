"""CUDA graphs of a model's forward.

The first call with a signature runs without a graph, the second is captured, later ones are
replayed. A graph repeats what Python decided during capture. So whatever such a decision depends on
is part of the signature or of the assumptions about the model; for everything else the call runs
without a graph, and the reason is counted.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...backends.torch_internals import pytree
from ...backends.user_warnings import warn
from ..runtime.gradients import autograd_records, gives_gradients, records_gradients
from ..runtime.random_draws import generator_states
from ..runtime.sites import equal
from .assumptions import Assumptions
from .buffers import Refusal
from .capture import (
    DRAWS,
    NOTHING_READ,
    Captured,
    capturing,
    keep,
    left_for_next_call,
    noting_given_state,
    relocations,
)
from .key import Call, check_surroundings, listed
from .kv_caches import DEPENDS_ON_LENGTH
from .recorder import CudaRecorder, Recorder, capture_lock

__all__ = ["Graphs", "capturing", "keep"]

FAILURES_REMEMBERED = 64
# where a forward differs from call to call: how often it is called to see by how much, how much it
# may be, and how many times as far a replay may be from it
REPEATS, ROUNDING, AS_NEAR = 3, 2**-5, 4.0
WRITES = "it writes to its buffers"
HOLDS_STATE = "it holds an object that its blocks may write to, such as a cache"
WEIGHTS_CHANGED = "weights were written to"
GRADIENTS = "gradients are recorded"


class BlockGraphs(Protocol):
    """The graphs of a model's blocks while gradients are recorded."""

    asked: bool  # whether the model has run so

    def describe(self) -> str:
        """One line for a report, empty if it has not."""


class Graphs:
    """CUDA graphs of one model's forward, one for each signature of its inputs.

    Up to `limit` graphs are kept; the least recently used is dropped first. A copy of a model that
    shares this object gets graphs of its own; a copy of this object starts empty. `name` is the
    name of the model in its pipeline. A call of which autograd keeps a record runs as it is:
    `of_blocks` has the graphs of its blocks.
    """

    recorder: ClassVar[type[Recorder]] = CudaRecorder

    def __init__(self, limit: int = 8, name: str = "") -> None:
        if limit < 1:
            raise ValueError(f"Graphs: limit is {limit}, expected at least 1")
        self.limit = limit
        self.name = name
        self.reasons: dict[str, int] = {}
        self.of_blocks: BlockGraphs | None = None
        self._recorder = self.recorder()
        self._models: WeakKeyDictionary[nn.Module, _Model] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[Graphs], tuple[int, str]]:
        return type(self), (self.limit, self.name)

    def __call__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The result of `forward(model, *args, **kwargs)`, from a graph where possible."""
        if torch.compiler.is_compiling():
            return forward(model, *args, **kwargs)
        if self.of_blocks is not None and _records_gradients(model, args, kwargs):
            self.of_blocks.asked = True
            return forward(model, *args, **kwargs)
        try:
            replayed, result = self._replay(model, forward, args, kwargs)
            if replayed:
                return result
        except Refusal as reason:
            self._count(str(reason))
        before, left = relocations(), left_for_next_call()
        states = generator_states(args, kwargs)
        written = self._versions_of_buffers(model)
        with noting_given_state() as given:
            result = forward(model, *args, **kwargs)
        if given and _holds_any(model, given):
            self._refuse(model, HOLDS_STATE)
        if relocations() != before:
            self._renew_assumptions(model)
        if generator_states(args, kwargs) != states:
            self._forget_warm_calls(model, DRAWS)
        elif written != self._versions_of_buffers(model):
            self._forget_warm_calls(model, WRITES)
        elif left != left_for_next_call():
            self._forget_warm_calls(model, left_for_next_call()[1])
        return result

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return sum(len(known.graphs) for known in self._models.values())

    def clear(self) -> None:
        """Drop every graph."""
        with capture_lock:
            self._models.clear()
            self._recorder.release()

    def describe(self) -> str:
        """One line for a report.

        >>> Graphs().describe()
        '0 graphs'
        >>> Graphs(name="text_encoder").describe()
        'text_encoder: 0 graphs'
        """
        line = f"{self.name}: " * bool(self.name) + _counted(self.captured, "graph")
        if not self.reasons:
            return line
        reasons = Counter(self.reasons).most_common()
        why = reasons[0][0] if len(reasons) == 1 else ", ".join(f"{r} ({n})" for r, n in reasons)
        return f"{line}; {_counted(sum(self.reasons.values()), 'call')} ran without one: {why}"

    def describe_training(self) -> str:
        """One line about the graphs of blocks, empty if no gradients were recorded."""
        return "" if self.of_blocks is None else self.of_blocks.describe()

    def _count(self, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def _replay(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """(True, result) if the call ran as a graph, else (False, None)."""
        check_surroundings()
        call = Call(args, kwargs, self._recorder.device_type)
        if autograd_records() and any(t.requires_grad for t in call.tensors):
            raise Refusal(GRADIENTS)
        if capturing() or self._recorder.busy():
            raise Refusal("inside another capture")
        with capture_lock:
            replayed, result = self._replay_then_check(model, call)
            if replayed:
                return True, result
            known = self._known(model)
            known.check(model, call)
            if call.key in known.failed:
                raise Refusal(known.failed[call.key])
            graph = known.graphs.get(call.key)
            if graph is not None and not graph.holds():
                self._count(WEIGHTS_CHANGED)
                graph = known.graphs.pop(call.key, None) and None
            if graph is None and not self._is_warm(known, call):
                return False, None
            with self._recorder.exclusive(call.device) as stream:
                if graph is None:
                    return True, self._capture(known, model, forward, call, stream)
                known.graphs.move_to_end(call.key)
                result, unchanged = graph.checked(call.tensors, call.caches, stream)
                with _undone_if_refused(graph, call):
                    graph.check_decisions()
            if unchanged():
                return True, self._confirmed(known, graph, model, forward, call, result)
            graph.cache_memory.set_back(call.caches)
            self._count(WEIGHTS_CHANGED)
            del known.graphs[call.key]
            return False, None

    def _confirmed(
        self,
        known: _Model,
        graph: Captured,
        model: nn.Module,
        forward: Callable[..., Any],
        call: Call,
        result: Any,
    ) -> Any:
        """The result of a replay; of the first with another length of its cache than at capture,
        compared with a plain forward."""
        if graph.cache_memory.confirmed:
            return result
        graph.cache_memory.confirmed, plain = _compared(graph, model, forward, call, result)
        if not graph.cache_memory.confirmed:
            self._count(DEPENDS_ON_LENGTH)
            known.failed[call.key] = DEPENDS_ON_LENGTH
            del known.graphs[call.key]
        return plain

    def _replay_then_check(self, model: nn.Module, call: Call) -> tuple[bool, Any]:
        """Replay, and check while the GPU works whether the graph was still valid. A graph writes
        only to its own memory, so a wrong result is simply dropped, and a cache set back; but its
        weights must still be at their addresses."""
        known = self._models.get(model)
        if known is None:
            return False, None
        switches = known.switches or call.switches
        graph = known.graphs.get((call.layout, switches))
        if graph is None or not known.assumptions.in_place():
            return False, None
        if not graph.cache_memory.confirmed:
            return False, None
        with self._recorder.exclusive(call.device) as stream:
            result, unchanged = graph.checked(call.tensors, call.caches, stream)
        known.note_switches(call.switches)
        same = switches == call.switches and known.assumptions.same(model)
        if not same or not graph.holds():
            graph.cache_memory.set_back(call.caches)
            return False, None
        with _undone_if_refused(graph, call):
            known.check(model, call)
            graph.check_decisions()
        if not unchanged():
            graph.cache_memory.set_back(call.caches)
            # the caller checks again: a prompt written to behind its version counter is copied in
            # and passes; weights that were changed are found changed once more
            graph.forget_inputs()
            return False, None
        known.graphs.move_to_end(call.key)
        return True, result

    def _known(self, model: nn.Module) -> _Model:
        known = self._models.get(model)
        if known is None or not known.assumptions.same(model):
            if known is not None and (known.graphs or known.warm):
                self._count("the model has changed")
            known = self._models[model] = _Model(model)
            if self.captured == 0 and known.assumptions.obstacle(model):
                self._recorder.release()
        return known

    def _renew_assumptions(self, model: nn.Module) -> None:
        """Accept the new addresses of weights that were packed during a forward, unless a graph
        reads the old ones."""
        with capture_lock:
            known = self._models.get(model)
            if known is not None and not known.graphs:
                known.assumptions = Assumptions(model)

    def _refuse(self, model: nn.Module, why: str) -> None:
        """Capture nothing of a model as long as it stays as it is."""
        with capture_lock:
            self._known(model).refused = why

    def _versions_of_buffers(self, model: nn.Module) -> list[int]:
        """Of a model that may be captured at its next call."""
        known = self._models.get(model)
        if known is None or not known.warm:
            return []
        return [0 if t.is_inference() else t._version for t in model.buffers()]

    def _forget_warm_calls(self, model: nn.Module, why: str) -> None:
        """Do not capture the call that just ran: it, or another thread, has changed what a capture
        would change once more."""
        with capture_lock:
            known = self._models.get(model)
            if known is not None and known.warm:
                self._count(why)
                known.warm.clear()

    def _is_warm(self, known: _Model, call: Call) -> bool:
        """True from the second call with this key in this thread; records the first. Only `limit`
        keys are remembered: inputs that alternate between more would be captured over and over."""
        threads = known.warm.setdefault(call.key, set())
        known.warm.move_to_end(call.key)
        if threading.get_ident() in threads:
            del known.warm[call.key]
            return True
        threads.add(threading.get_ident())
        if len(known.warm) > self.limit:
            known.warm.popitem(last=False)
            self._count("inputs that did not recur soon")
        return False

    def _capture(
        self, known: _Model, model: nn.Module, forward: Callable[..., Any], call: Call, stream: Any
    ) -> Any:
        while len(known.graphs) >= self.limit:
            known.graphs.popitem(last=False)

        def captured(reads_on_host: bool) -> Captured:
            return Captured(
                self._recorder,
                lambda *args, **kwargs: forward(model, *args, **kwargs),
                call.tensors,
                call.with_tensors,
                known.assumptions.weights(),
                reads_on_host,
                call.caches,
            )

        try:
            graph = _twice(captured)
            result = graph(call.tensors, call.caches, stream)
            with _undone_if_refused(graph, call):
                # some code takes another path while its stream is being captured
                if not _compared(graph, model, forward, call, result)[0]:
                    raise Refusal("its graph gives other bits than the plain forward")
        except Exception as error:
            reason = str(error) if isinstance(error, Refusal) else f"capture failed: {_line(error)}"
            if reason != DRAWS:  # another thread may have drawn them: try again later
                known.failed[call.key] = reason
                warn(f"{self.name or type(model).__name__} runs without a CUDA graph: {reason}")
            if len(known.failed) > FAILURES_REMEMBERED:
                known.failed.popitem(last=False)
            raise Refusal(reason) from None
        known.graphs[call.key] = graph
        return result


def _compared(
    graph: Captured, model: nn.Module, forward: Callable[..., Any], call: Call, result: Any
) -> tuple[bool, Any]:
    """Whether a replay gave what the plain forward gives, and that. Steps of a language model may
    give other bits from call to call: cuDNN's attention of one token with thousands adds in any
    order. A replay must then be as near to the forward as the forward is to itself."""
    args, kwargs = call.with_tensors(call.tensors)

    def plain() -> Any:
        graph.cache_memory.set_back(call.caches)
        return forward(model, *args, **kwargs)

    first = plain()
    if equal(result, first):
        return True, first
    if not call.caches:
        return False, first
    apart = max(_distance(plain(), first) for _ in range(REPEATS))
    return apart <= ROUNDING and _distance(result, first) <= AS_NEAR * apart, first


def _distance(a: Any, b: Any) -> float:
    """The largest difference between two results of a forward, relative to the largest value;
    infinite if they are not alike."""
    ours, theirs = pytree.tree_leaves(a), pytree.tree_leaves(b)
    pairs = [(x, y) for x, y in zip(ours, theirs, strict=True) if isinstance(x, Tensor)]
    if any(x.shape != y.shape or x.dtype != y.dtype for x, y in pairs):
        return math.inf
    found = [(x - y).abs().max() / y.abs().max() for x, y in pairs if x.numel()]
    return max((math.inf if d != d else float(d) for d in found), default=0.0)


@contextmanager
def _undone_if_refused(graph: Captured, call: Call) -> Iterator[None]:
    """Sets caches back if the replay before is refused: the plain forward follows."""
    try:
        yield
    except Refusal:
        graph.cache_memory.set_back(call.caches)
        raise


def _twice(captured: Callable[[bool], Captured]) -> Captured:
    """A plain capture, or if that fails one that repeats what the forward reads on the host."""
    try:
        return captured(False)
    except (Refusal, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = error.with_traceback(None)
    try:
        return captured(True)
    except Exception as second:
        if str(second) == NOTHING_READ:
            raise first from None
        again = f"with what it reads on the host repeated: {_line(second)}"
        raise Refusal(f"capture failed: {_line(first)}; {again}") from second


class _Model:
    """The graphs of a model, and what they assume of it."""

    def __init__(self, model: nn.Module) -> None:
        self.assumptions = Assumptions(model)
        self.graphs: OrderedDict[Any, Captured] = OrderedDict()
        self.warm: OrderedDict[Any, set[int]] = OrderedDict()
        self.failed: OrderedDict[Any, str] = OrderedDict()
        # those of PyTorch at every replay so far: None before the first, and once they have changed
        self.switches: tuple[Any, ...] | None = None
        self._switches_vary = False
        self.refused: str | None = None  # why no call is captured

    def note_switches(self, now: tuple[Any, ...]) -> None:
        """A replay assumes the switches of the one before, and is dropped if they have changed:
        reading them takes 20 to 40 us of an H200's host, and the GPU can start before. Once they
        have changed between two calls, they are read first."""
        self._switches_vary |= self.switches not in (None, now)
        self.switches = None if self._switches_vary else now

    def check(self, model: nn.Module, call: Call) -> None:
        if obstacle := self.refused or self.assumptions.obstacle(model):
            raise Refusal(obstacle)
        if elsewhere := self.assumptions.devices - {call.device}:
            raise Refusal(f"weights on {listed(elsewhere)}")
        if autograd_records() and any(w.requires_grad for w in self.assumptions.weights()):
            raise Refusal(GRADIENTS)


def _holds_any(model: nn.Module, values: list[Any]) -> bool:
    """Whether a module of a model holds one of these objects: what is written to it in one call is
    there in the next, and a capture runs the forward more than once."""
    ids = set(map(id, values))
    return any(id(held) in ids for m in model.modules() for held in vars(m).values())


def _records_gradients(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not autograd_records():
        return False
    return gives_gradients(args, kwargs) or records_gradients(
        m._parameters for m in model.modules()
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _line(error: Exception) -> str:
    """The first line of an error message, or the error's class if there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
