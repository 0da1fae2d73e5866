"""GPU time, host time and wall time of calls.

GPU time is one replay of a CUDA graph divided by its calls; the graph rotates over argument sets of
three times the L2 cache, so it has no launch gaps and no warm cache. Host time is the time of the
calling thread, measured separately. What is compared is measured in turns: clock drift hits all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..calibration import background
from . import turns

# the fewest readings of each call, however short the time
READINGS = 9
CPU_READINGS = 3  # each takes seconds at the shapes of models


@dataclass(frozen=True)
class Timed:
    """A call, and the argument sets to rotate over."""

    call: Callable[[Any], Any]
    sets: Sequence[Any]


def rotation(bytes_a_set: int, device: torch.device) -> int:
    """How many argument sets exceed three times the L2 cache."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(64, 1 + 3 * cache // max(1, bytes_a_set)))


class Replay:
    """A CUDA graph of the calls with all argument sets of a `Timed`."""

    def __init__(self, timed: Timed) -> None:
        self._timed = timed  # keeps the memory that the graph reads
        rounds = max(1, 20 // len(timed.sets))
        self.calls = rounds * len(timed.sets)
        # outputs rotate too: none is written while still in the cache
        self._kept: list[Any] = [None] * len(timed.sets)
        # pending work may still read memory that was reused for the sets: let it finish
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for i, arguments in enumerate(timed.sets[:2]):
                self._kept[i] = timed.call(arguments)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(rounds):
                for i, arguments in enumerate(timed.sets):
                    self._kept[i] = timed.call(arguments)
        self._graph.replay()
        torch.cuda.synchronize()

    def __call__(self) -> float:
        """Microseconds of a call, by events around one replay of the graph."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / self.calls


def medians(
    readings: Mapping[str, Callable[[], float]], seconds: float, least: int = READINGS
) -> dict[str, float]:
    """The median of each reading, taken in turns for `seconds` a reading."""
    taken: dict[str, list[float]] = {name: [] for name in readings}
    end = time.perf_counter() + seconds * len(readings)
    rounds = 0
    while rounds < least or time.perf_counter() < end:
        for name, read in readings.items():
            taken[name].append(read())
        rounds += 1
    return {name: statistics.median(values) for name, values in taken.items()}


def host_reading(timed: Timed, gpu_us: float) -> Callable[[], float]:
    """A function that measures the host microseconds of a call that takes `gpu_us` on the GPU."""
    calls = max(5, min(100, int(20_000 / gpu_us)))

    def read() -> float:
        timed.call(timed.sets[0])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            timed.call(timed.sets[0])
        spent = time.perf_counter() - begin
        torch.cuda.synchronize()
        return spent * 1e6 / calls

    return read


def wall_reading(timed: Timed) -> Callable[[], float]:
    """A function that measures the wall microseconds of a call on the CPU."""

    def read() -> float:
        begin = time.perf_counter()
        timed.call(timed.sets[0])
        return (time.perf_counter() - begin) * 1e6

    return read


class HostPace:
    """How fast the host runs Python. A core of a shared machine may run at half its speed for
    seconds at a time, and then what the host limits takes twice as long."""

    ADDITIONS = 5000  # some 150 us
    SLOW = 1.25  # times the shortest

    def __init__(self) -> None:
        self.shortest = float("inf")

    def loop(self) -> float:
        """Seconds of a loop of Python."""
        begin, total = time.perf_counter(), 0
        for i in range(self.ADDITIONS):
            total += i
        spent = time.perf_counter() - begin
        self.shortest = min(self.shortest, spent)
        return spent

    def is_slow(self, loop: float) -> bool:
        return loop > self.SLOW * self.shortest


_pace = HostPace()


def milliseconds(call: Callable[[], Any], seconds: float) -> float:
    """Median wall time of a call with the GPU's work done; five calls or more, for `seconds`. Those
    beside which the host ran slowly do not count, unless it does so for three times as long. A
    calibration in the background ends before."""
    readings: list[tuple[float, float]] = []  # of a call, and of the loop beside it
    background.wait()
    wait()
    with turns.alone():
        end = time.perf_counter() + seconds
        last = end + 2 * seconds
        while True:
            wait()
            before = _pace.loop()
            begin = time.perf_counter()
            call()
            wait()
            spent = time.perf_counter() - begin
            readings.append((spent * 1e3, max(before, _pace.loop())))
            steady = [ms for ms, loop in readings if not _pace.is_slow(loop)]
            now, enough = time.perf_counter(), len(steady) >= 5
            if len(readings) >= 5 and now >= (end if enough else last):
                return statistics.median(steady if enough else [ms for ms, _ in readings])


def wait() -> None:
    """Wait for the GPU's work, where there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def copying(moved: int, device: torch.device) -> Timed:
    """A copy that reads and writes `moved` bytes in all."""
    half = max(1, moved // 2)
    if device.type == "cuda":  # odd sizes take a slower copy kernel
        half = max(1, half >> 16) << 16
    pairs = [
        tuple(torch.randint(0, 255, (half,), dtype=torch.uint8, device=device) for _ in range(2))
        for _ in range(rotation(2 * half, device))
    ]
    return Timed(lambda pair: pair[1].copy_(pair[0]), pairs)


def bytes_of(values: Sequence[Any]) -> int:
    """Bytes of the tensors; broadcast memory counts once."""
    total = 0
    for t in values:
        if isinstance(t, Tensor):
            elements = 1
            for n, s in zip(t.shape, t.stride(), strict=True):
                elements *= n if s else 1
            total += elements * t.element_size()
    return total
