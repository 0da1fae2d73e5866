"""Recorders: they capture work on a device and replay it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from ...backends import torch_internals

# PyTorch captures one graph at a time in a process
capture_lock = threading.RLock()
# other threads may allocate while one captures
ERROR_MODE = "thread_local"


class Recorder(Protocol):
    """Captures work on a device for replay."""

    device_type: str

    def __init__(self, partner: Any = None) -> None:
        """With a recorder whose graphs never run at the same time as its own, it shares what
        cuBLAS needs: 32 MiB on an H200."""

    def busy(self) -> bool:
        """Whether the current stream is being captured already."""

    def exclusive(self, device: torch.device) -> Any:
        """A context for work on graph memory: it waits for all such work on other streams. Gives
        the current stream."""

    def record(
        self, run: Callable[[], Any], device: torch.device
    ) -> tuple[Callable[[], None], Any]:
        """Capture `run`. Returns a function that replays it, and what `run` returned."""

    def stream(self) -> Any:
        """The current stream."""

    def mark(self, device: torch.device, stream: Any) -> None:
        """Remember all work that was launched on a stream until now."""

    def beside(self, device: torch.device) -> Any:
        """A context for work that waits for what was last remembered, and for nothing after it."""

    def release(self) -> None:
        """Free memory that is reserved for graphs."""


class _Shared:
    """What the graphs of one recorder share on a device: a memory pool, and the stream of their
    captures (the pool's free memory is reused per stream). Graphs that share memory must not run
    concurrently: each waits for the previous one."""

    def __init__(self, device: torch.device, captures: torch.cuda.Stream | None = None) -> None:
        self.captures = captures or torch.cuda.Stream(device)
        # its kernels are small, and the host waits for them
        self.beside = torch.cuda.Stream(device, priority=-1)
        self.done, self.marked = torch.cuda.Event(), torch.cuda.Event()
        self.last: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._left: list[torch.cuda.CUDAGraph] = []

    def pool(self) -> Any:
        """The pool, kept alive by a tiny graph: cuBLAS's workspace for the stream lies in it, which
        later graphs use too, and the allocator refuses a pool whose last graph is gone."""
        if self._anchor is None:
            self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.stream(self.captures):
                self._anchor = _tiny_graph(self._pool)
        return self._pool

    def leave_pool(self) -> None:
        """Use a new pool: the allocator accepts no captures in a pool after one has failed. The old
        pool is kept alive: cuBLAS still uses its workspace there."""
        if self._anchor is not None:
            self._left.append(self._anchor)
        self._pool = self._anchor = None


class CudaRecorder:
    """Captures CUDA graphs."""

    device_type = "cuda"

    def __init__(self, partner: CudaRecorder | None = None) -> None:
        self._partner = partner
        self._shared: dict[torch.device, _Shared] = {}

    def busy(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def mark(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._shared_on(device).marked.record(stream)

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        shared = self._shared_on(device)
        shared.beside.wait_event(shared.marked)
        with torch.cuda.stream(shared.beside):
            yield

    @contextmanager
    def exclusive(self, device: torch.device) -> Iterator[torch.cuda.Stream]:
        with torch.cuda.device(device):
            shared = self._shared_on(device)
            stream = torch.cuda.current_stream()
            if shared.last is not None and shared.last != stream:
                stream.wait_event(shared.done)
            try:
                yield stream
            finally:
                shared.done.record(stream)
                shared.last = stream

    def record(
        self, run: Callable[[], Any], device: torch.device
    ) -> tuple[Callable[[], None], Any]:
        shared = self._shared_on(device)
        pool, graph = shared.pool(), torch.cuda.CUDAGraph()
        # creating a thread's cuBLAS handle is not allowed during capture
        torch.cuda.current_blas_handle()
        torch.cuda.synchronize()
        # a pool allocates new memory: free what the allocator caches for eager calls
        torch.cuda.empty_cache()
        with torch.cuda.stream(shared.captures):
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
                shared.leave_pool()
                raise
        return graph.replay, result

    def release(self) -> None:
        self._shared.clear()

    def _shared_on(self, device: torch.device) -> _Shared:
        if device not in self._shared:
            # cuBLAS has a workspace for each stream
            other = None if self._partner is None else self._partner._shared_on(device).captures
            self._shared[device] = _Shared(device, other)
        return self._shared[device]


def _end(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """End a capture. If the driver refuses, PyTorch's allocator still acts as if capturing, and
    so may its random generator, which then raises at the next draw."""
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):
            torch_internals.end_allocating_to_pool(device.index, pool)
            torch_internals.release_pool(device.index, pool)
        with suppress(RuntimeError):
            # a capture that succeeds resets the generator
            _tiny_graph(None)
        raise


def _tiny_graph(pool: Any) -> torch.cuda.CUDAGraph:
    spare = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode=ERROR_MODE)
    spare.zero_()
    graph.capture_end()
    return graph
