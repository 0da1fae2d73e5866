"""GPU time and host time of a call.

GPU time is one replay of a CUDA graph that walks over rotated argument sets larger than three times
the L2 cache, divided by its calls: no launch gaps, no warm cache. Host time is what the caller's
thread spends, measured apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def rotation(bytes_a_set: int, device: torch.device) -> int:
    """How many argument sets it takes to outgrow the cache three times over."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(64, 1 + 3 * cache // max(1, bytes_a_set)))


def gpu_us(call: Callable[[Any], Any], sets: Sequence[Any], replays: int = 9) -> float:
    """Median GPU microseconds of call(set) over the sets, in a CUDA graph."""
    rounds = max(1, 20 // len(sets))
    kept: list[Any] = [None] * len(sets)  # outputs rotate as well, so none is written twice hot
    # memory that pending work still reads may already belong to the sets: let it finish
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for i, arguments in enumerate(sets[:2]):
            kept[i] = call(arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for i, arguments in enumerate(sets):
                kept[i] = call(arguments)
    graph.replay()
    torch.cuda.synchronize()
    readings = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        readings.append(begin.elapsed_time(end) * 1e3 / (rounds * len(sets)))
    return statistics.median(readings)


def host_us(
    ways: Mapping[str, Callable[[], Any]], calls: int = 100, repeats: int = 9
) -> dict[str, float]:
    """Median microseconds that the calling thread spends on a call of each of the ways, taken in
    turns: a CPU that slows down for a while slows them all."""
    readings: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, call in ways.items():
            call()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            readings[name].append((time.perf_counter() - begin) * 1e6 / calls)
    torch.cuda.synchronize()
    return {name: statistics.median(taken) for name, taken in readings.items()}


def copy_us(moved: int, device: torch.device) -> float:
    """GPU microseconds of a device copy that reads and writes `moved` bytes in all."""
    # odd sizes take another, slower copy kernel
    half = max(1, moved // 2 >> 16) << 16
    pairs = [
        tuple(torch.randint(0, 255, (half,), dtype=torch.uint8, device=device) for _ in range(2))
        for _ in range(rotation(2 * half, device))
    ]
    return gpu_us(lambda pair: pair[1].copy_(pair[0]), pairs)


def bytes_of(values: Sequence[Any]) -> int:
    """Bytes of the tensors, memory shared by broadcasting counted once."""
    total = 0
    for t in values:
        if isinstance(t, Tensor):
            elements = 1
            for n, s in zip(t.shape, t.stride(), strict=True):
                elements *= n if s else 1
            total += elements * t.element_size()
    return total
