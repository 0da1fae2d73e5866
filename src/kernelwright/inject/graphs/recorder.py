"""What records: work on a device, turned into something that can be done again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from ...backends import torch_internals

# other threads may go on allocating while one captures
ERROR_MODE = "thread_local"


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
            torch_internals.end_allocating_to_pool(device.index, pool)
            torch_internals.release_pool(device.index, pool)
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
