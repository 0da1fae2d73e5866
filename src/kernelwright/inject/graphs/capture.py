"""Capturing a forward, and replaying it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...backends.torch_internals import pytree
from ..runtime.random_draws import states_of
from ..state.sample_comparison import SampleComparison, is_readable
from ..state.tensor_samples import PendingCheck, compare_pairs, pending, sample_views
from ..state.weights_at_rest import is_at_rest
from .buffers import InputBuffer, Refusal, Results
from .host_reads import HostReads
from .kv_caches import CacheMemory
from .mask_decisions import Decisions
from .prompt_graph import PromptGraph
from .recorder import Recorder

T = TypeVar("T")
DRAWS = "it draws random numbers"
NOTHING_READ = "it reads nothing on the host"


class _Running(threading.local):
    kept: list[Any] | None = None  # cached values that the graph being captured reads
    dependencies: list[Tensor] | None = None  # tensors that such values were computed from
    phase: int = 0
    relocations: int = 0
    left: tuple[int, str] = 0, ""
    given: list[Any] | None = None  # objects that a block may write to


_running = _Running()


def keep(value: T) -> T:
    """Returns a cached value; if this thread is capturing, its graph keeps the value alive."""
    if _running.kept is not None:
        _running.kept.append(value)
    return value


def phase() -> int:
    """A number that changes whenever this thread starts or ends a capture. A value computed in one
    phase is not part of a graph captured in another, even if it was computed from the same tensor.
    """
    return _running.phase


def depend(tensor: Tensor) -> None:
    """If this thread is capturing: its graph is valid until this tensor is written to, because it
    reads a value that was computed from the tensor earlier."""
    if _running.dependencies is not None:
        _running.dependencies.append(tensor)


def relocated() -> None:
    """Report that we moved weights of the running model to another address."""
    _running.relocations += 1


def relocations() -> int:
    """How often this thread has reported that."""
    return _running.relocations


def leave_for_next_call(what: str) -> None:
    """Report that the next call of the running model does something that a capture would not."""
    _running.left = _running.left[0] + 1, what


def left_for_next_call() -> tuple[int, str]:
    """How often this thread has reported that, and what last."""
    return _running.left


def given_state(values: Iterable[Any]) -> None:
    """Report objects that a block of the running model is given, and may write to."""
    if _running.given is not None:
        _running.given += values


@contextmanager
def noting_given_state() -> Iterator[list[Any]]:
    """Collect what this thread reports by `given_state`."""
    before, _running.given = _running.given, []
    try:
        yield _running.given
    finally:
        _running.given = before


def capturing() -> bool:
    """Whether this thread is capturing a graph of ours: tensors then have no values to read."""
    return _running.kept is not None


class Captured:
    """A forward captured for one signature. Calling it copies the inputs in, replays, and copies
    the results out."""

    def __init__(
        self,
        recorder: Recorder,
        forward: Callable[..., Any],
        inputs: Sequence[Tensor],
        arguments: Callable[[Sequence[Tensor]], tuple[tuple, dict[str, Any]]],
        weights: Sequence[Tensor],
        reads_on_host: bool = False,
        caches: Sequence[Any] = (),
    ) -> None:
        self.cache_memory = CacheMemory(caches)
        try:
            self._capture(recorder, forward, inputs, arguments, weights, reads_on_host, caches)
        finally:
            self.cache_memory.set_back(caches)

    def _capture(
        self,
        recorder: Recorder,
        forward: Callable[..., Any],
        inputs: Sequence[Tensor],
        arguments: Callable[[Sequence[Tensor]], tuple[tuple, dict[str, Any]]],
        weights: Sequence[Tensor],
        reads_on_host: bool,
        caches: Sequence[Any],
    ) -> None:
        self._recorder = recorder
        self._stream = recorder.stream()
        self._buffers = [InputBuffer(i) for i in inputs]
        memory = self._memory = [buffer.tensor for buffer in self._buffers]
        args, kwargs = arguments(memory)
        leaves = pytree.tree_leaves((args, kwargs))
        device = memory[0].device
        prompt_graph = self._prompt_graph = PromptGraph(memory)
        decisions = self._decisions = Decisions()
        reads = self._reads = HostReads(device.type) if reads_on_host else None
        for buffer, given in zip(self._buffers, inputs, strict=True):
            buffer.fill(given)

        def run() -> Any:
            with prompt_graph.running(), decisions.running(), recording():
                if reads is None:
                    return forward(*args, **kwargs)
                with reads.running():
                    result = forward(*args, **kwargs)
                reads.finish()
                return result

        def recompute() -> None:
            with recording():
                prompt_graph.recompute()

        devices = {device} if device.type == "cuda" else set()
        before = states_of(devices)
        run()
        if states_of(devices) != before:  # unlike the warm-up call
            raise Refusal(DRAWS)
        self.cache_memory.note_steps(caches)
        self.cache_memory.set_back(caches)
        prompt_graph.finish()
        decisions.collecting = False
        if reads is None:
            decisions.find_constant(lambda: forward(*args, **kwargs))
            self.cache_memory.set_back(caches)
        if reads is not None:
            reads.collecting = False
            if not reads.kept:
                raise Refusal(NOTHING_READ)
        versions = [t._version for t in memory]
        self._replay_prompt_graph: Callable[[], None] | None = None
        with keeping() as (self._kept, self._dependencies), _autocast_without_cache(device):
            if prompt_graph.sources:
                self._replay_prompt_graph, _ = recorder.record(recompute, device)
            self._replay, result = recorder.record(run, device)
        self._dependencies += prompt_graph.weights
        if versions != [t._version for t in memory]:
            raise Refusal("forward writes to its inputs")
        if list(map(id, pytree.tree_leaves((args, kwargs)))) != list(map(id, leaves)):
            raise Refusal("forward changes a list or a dict among its inputs")
        dependencies = list({id(t): t for t in self._dependencies}.values())
        views = sample_views([t for t in dependencies if is_at_rest(t)], sparse=True)
        by_host = [view for view in views if not is_readable(view, device)]
        self._at_rest = SampleComparison(by_host, [view.clone() for view in by_host])
        views = [view for view in views if is_readable(view, device)]
        views += sample_views([t for t in dependencies if not is_at_rest(t)])
        self._samples = SampleComparison(views, [view.clone() for view in views], device)
        if reads is not None:
            self._dependencies += [t for t in reads.sources if not t.is_inference()]
        self._results = Results(result, memory, weights, caches)
        self._versions = self._versions_now()

    def holds(self) -> bool:
        """Whether the version counters of the graph's dependencies are those at its capture."""
        return self._versions_now() == self._versions

    def check_decisions(self) -> None:
        """Refuse the last replay if its inputs need other mask decisions, or other values on the
        host. This waits for the GPU, as a plain forward does, but only if it reads any."""
        self._decisions.check()
        if self._reads is not None:
            self._reads.check()

    def checked(
        self, inputs: Sequence[Tensor], caches: Sequence[Any], stream: Any
    ) -> tuple[Any, PendingCheck]:
        """Replay, and start to compare sampled values with those at capture. The comparison waits
        for work launched before the replay, but runs beside it: before it, on an H200, it took 0.8
        of 40.5 ms of LTX-Video, and in fp8, with samples in the host's memory, 1.2 of 28.4."""
        device = self._memory[0].device
        self._recorder.mark(device, stream)
        sources = self._prompt_graph.sources
        old = [i for i in sources if not self._prompt_graph.is_new(i, inputs[i])]
        result = self(inputs, caches, stream)
        with self._recorder.beside(device):
            pairs = compare_pairs((self._memory[i], inputs[i]) for i in old)
            wait = pending([*self._samples(), *pairs])
        return result, lambda: self._resting_unchanged() and wait()

    def _resting_unchanged(self) -> bool:
        """Whether weights that rest on the CPU, and that the GPU cannot read there, are unchanged;
        compared while it replays."""
        return all(map(bool, self._at_rest()))

    def forget_inputs(self) -> None:
        """Treat the next inputs as new, whatever they are."""
        self._prompt_graph.forget()

    def _versions_now(self) -> list[int]:
        return list(map(_version, self._dependencies))

    def __call__(self, inputs: Sequence[Tensor], caches: Sequence[Any], stream: Any) -> Any:
        """Refused if other caches use the memory of the graph. What this writes to caches can be
        undone by `cache_memory.set_back`."""
        if caches:
            self.cache_memory.take_over(caches)
            self.cache_memory.save(caches)
        if stream != self._stream:
            for buffer in self._buffers:
                buffer.tensor.record_stream(stream)
        new_prompt = False
        for i, (buffer, given) in enumerate(zip(self._buffers, inputs, strict=True)):
            if i in self._prompt_graph.sources:
                if not self._prompt_graph.is_new(i, given):
                    continue
                self._prompt_graph.note(i, given)
                new_prompt = True
            buffer.fill(given)
        if new_prompt and self._replay_prompt_graph is not None:
            self._replay_prompt_graph()
        self._replay()
        self.cache_memory.advance(caches)
        return self._results.copies(inputs, caches)


_version = attrgetter("_version")


@contextmanager
def recording() -> Iterator[None]:
    """Changes `phase` on entry and on exit."""
    _running.phase += 1
    try:
        yield
    finally:
        _running.phase += 1


@contextmanager
def keeping() -> Iterator[tuple[list[Any], list[Tensor]]]:
    """For the time of a capture: cached values that it reads, and what they were computed from."""
    kept: list[Any] = []
    dependencies: list[Tensor] = []
    _running.kept, _running.dependencies = kept, dependencies
    try:
        yield kept, dependencies
    finally:
        _running.kept = _running.dependencies = None


@contextmanager
def _autocast_without_cache(device: torch.device) -> Iterator[None]:
    """Turns autocast's weight cache off: it is freed when autocast ends, but a graph would go on
    reading it. Where autocast is off, the cache setting is left alone: torch.compile would
    recompile."""
    before = torch.is_autocast_cache_enabled()
    if torch.is_autocast_enabled(device.type):
        torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
