"""Recording a forward, and doing again what was recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import adapters
from .memory import Refusal, Results, Room
from .prelude import Prelude

T = TypeVar("T")
# other threads may go on allocating while one captures
ERROR_MODE = "thread_local"


class _Running(threading.local):
    kept: list[Any] | None = None
    given: list[Tensor] | None = None
    phase: int = 0
    relocations: int = 0


_running = _Running()


def keep(value: T) -> T:
    """Hand out a value of a cache: if this thread is capturing, its graph keeps the value alive."""
    if _running.kept is not None:
        _running.kept.append(value)
    return value


def phase() -> int:
    """A number that changes whenever this thread begins or ends to record. What was made in one
    phase is not part of what is recorded in another, even if it was made of the same tensor."""
    return _running.phase


def depend(tensor: Tensor) -> None:
    """If this thread is capturing: what its graph does holds as long as nobody writes to this
    tensor, of which something was made that the graph reads instead."""
    if _running.given is not None:
        _running.given.append(tensor)


def relocated() -> None:
    """Say that weights of the running model were given another place in memory, by us."""
    _running.relocations += 1


def relocations() -> int:
    """How often this thread has said so."""
    return _running.relocations


def capturing() -> bool:
    """Whether this thread is capturing for a graph of ours: tensors then have no values yet."""
    return _running.kept is not None


class Recorder(Protocol):
    """Turns work on a device into something that can be done again."""

    device_type: str

    def busy(self) -> bool:
        """Whether the current stream is recorded already."""

    def turn(self, device: torch.device) -> Any:
        """A context for work on the memory of graphs: it starts after all such work before it."""

    def record(
        self, run: Callable[[], Any], device: torch.device
    ) -> tuple[Callable[[], None], Any]:
        """A function that does the work of `run` again, and what `run` returned."""

    def stream(self) -> Any:
        """The current stream."""

    def release(self) -> None:
        """Let go of memory that is held in reserve for graphs."""


class Captured:
    """A forward captured for one signature. A call copies the inputs in, replays, and copies the
    results out."""

    def __init__(
        self,
        recorder: Recorder,
        forward: Callable[..., Any],
        inputs: Sequence[Tensor],
        arguments: Callable[[Sequence[Tensor]], tuple[tuple, dict[str, Any]]],
        weights: Sequence[Tensor],
        rewind: Callable[[], None],
    ) -> None:
        self._recorder = recorder
        self._home = recorder.stream()
        self._rooms = [Room(i) for i in inputs]
        memory = self._memory = [room.tensor for room in self._rooms]
        args, kwargs = arguments(memory)
        leaves = pytree.tree_leaves((args, kwargs))
        device = memory[0].device
        prelude = self._prelude = Prelude(memory)
        for room, given in zip(self._rooms, inputs, strict=True):
            room.fill(given)

        def run() -> Any:
            with prelude.running(), recording():
                return forward(*args, **kwargs)

        def make_again() -> None:
            with recording():
                prelude.make_again()

        before = _random_state(device)
        run()
        # a replay moves the random generator on, so one too many could not be undone
        self.random = not torch.equal(before, _random_state(device))
        rewind()
        prelude.collecting = False
        versions = [t._version for t in memory]
        self._replay_prelude: Callable[[], None] | None = None
        with _keeping() as (self._kept, self._given), _autocast_without_cache():
            if prelude.sources:
                self._replay_prelude, _ = recorder.record(make_again, device)
            self._replay, result = recorder.record(run, device)
        self._given += prelude.weights
        if versions != [t._version for t in memory]:
            raise Refusal("forward writes to its inputs")
        if list(map(id, pytree.tree_leaves((args, kwargs)))) != list(map(id, leaves)):
            raise Refusal("forward changes a list or a dict among its inputs")
        self._results = Results(result, memory, weights)
        self._facts = self._now()

    def holds(self) -> bool:
        """Whether nobody has written to what the graph depends on since it was captured."""
        return self._now() == self._facts

    def _now(self) -> tuple[list[int], int]:
        # an adapter may be merged into a weight behind the back of its version
        return list(map(_version, self._given)), adapters.all_moves() if self._given else 0

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        stream = self._recorder.stream()
        prelude = False
        for number, (room, given) in enumerate(zip(self._rooms, inputs, strict=True)):
            if stream != self._home:
                room.tensor.record_stream(stream)
            if number in self._prelude.sources:
                if not self._prelude.is_new(number, given):
                    continue
                prelude = True
            room.fill(given)
        if prelude and self._replay_prelude is not None:
            self._replay_prelude()
        self._replay()
        return self._results.give(inputs)


_version = attrgetter("_version")


@contextmanager
def recording() -> Iterator[None]:
    """While this lasts, and again after it, `phase` is another one."""
    _running.phase += 1
    try:
        yield
    finally:
        _running.phase += 1


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _keeping() -> Iterator[tuple[list[Any], list[Tensor]]]:
    kept: list[Any] = []
    given: list[Tensor] = []
    _running.kept, _running.given = kept, given
    try:
        yield kept, given
    finally:
        _running.kept = _running.given = None


@contextmanager
def _autocast_without_cache() -> Iterator[None]:
    """Weights that autocast has cast and kept die when it is left, but a graph would go on reading
    them: inside a graph it casts anew."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Lane:
    """What the graphs of one recorder share on a device: a memory pool, and the stream they are
    captured on, without which they would not find each other's free memory in the pool. So no two
    of them may run at once, and the next waits for the last one to be done."""

    def __init__(self, device: torch.device) -> None:
        self.captures = torch.cuda.Stream(device)
        self.done = torch.cuda.Event()
        self.last: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._left: list[torch.cuda.CUDAGraph] = []

    def pool(self) -> Any:
        """The pool, kept in being by a small graph: cuBLAS has its workspace for the stream in it,
        which later graphs use too, and the allocator refuses a pool whose last graph is gone."""
        if self._anchor is None:
            self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.stream(self.captures):
                self._anchor = _capture_little(self._pool)
        return self._pool

    def leave_pool(self) -> None:
        """Start another pool: the allocator takes no more captures into one whose capture failed.
        The old one stays in being: cuBLAS goes on using its workspace."""
        if self._anchor is not None:
            self._left.append(self._anchor)
        self._pool = self._anchor = None


class CudaRecorder:
    """Records CUDA graphs."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._lanes: dict[torch.device, _Lane] = {}

    def busy(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        with torch.cuda.device(device):
            lane = self._lane(device)
            stream = torch.cuda.current_stream()
            if lane.last is not None and lane.last != stream:
                stream.wait_event(lane.done)
            try:
                yield
            finally:
                lane.done.record(stream)
                lane.last = stream

    def record(
        self, run: Callable[[], Any], device: torch.device
    ) -> tuple[Callable[[], None], Any]:
        lane = self._lane(device)
        pool, graph = lane.pool(), torch.cuda.CUDAGraph()
        # the first use of cuBLAS in a thread does what a capture forbids
        torch.cuda.current_blas_handle()
        torch.cuda.synchronize()
        # a pool takes fresh memory: leave it what eager calls hold in reserve
        torch.cuda.empty_cache()
        with torch.cuda.stream(lane.captures):
            try:
                graph.capture_begin(pool=pool, capture_error_mode=ERROR_MODE)
                try:
                    result = run()
                except BaseException:
                    with suppress(RuntimeError):
                        _end(graph, device, pool)
                    raise
                _end(graph, device, pool)
            except BaseException:
                lane.leave_pool()
                raise
        return graph.replay, result

    def release(self) -> None:
        self._lanes.clear()

    def _lane(self, device: torch.device) -> _Lane:
        if device not in self._lanes:
            self._lanes[device] = _Lane(device)
        return self._lanes[device]


def _end(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """End a capture. If the driver refuses, PyTorch's allocator still believes in the capture, and
    so may its random generator, which then fails at the next number it shall draw."""
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        with suppress(RuntimeError):
            # for the generator, one that ends well is the end of the failed one too
            _capture_little(None)
        raise


def _capture_little(pool: Any) -> torch.cuda.CUDAGraph:
    spare = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode=ERROR_MODE)
    spare.zero_()
    graph.capture_end()
    return graph
