"""The kernels of one call, by torch.profiler."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from .categories import KernelTime


def record(
    call: Callable[[], Any], device: str | torch.device, trace: Path | None = None
) -> list[KernelTime]:
    """The kernels that `call` runs, longest first; `trace` also keeps a Chrome trace.

    On the CPU it lists ops instead of kernels, with self time: without the ops that they call.
    """
    gpu = torch.device(device).type == "cuda"
    activities = [ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
    if gpu and trace is not None:
        activities.append(ProfilerActivity.CPU)
    if gpu:
        torch.cuda.synchronize(device)
    else:
        # from torch 2.13 on the profiler prints a line at each start and stop, above its errors;
        # on a GPU those errors matter
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        if gpu:
            torch.cuda.synchronize(device)
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    found = _gpu_kernels(profiler) if gpu else _cpu_ops(profiler)
    return sorted(found, key=lambda kernel: -kernel.ms)


def _gpu_kernels(profiler: Any) -> list[KernelTime]:
    calls: dict[str, int] = defaultdict(int)
    ms: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            calls[event.name] += 1
            ms[event.name] += event.time_range.elapsed_us() / 1e3
    return [KernelTime(name, calls[name], ms[name]) for name in calls]


def _cpu_ops(profiler: Any) -> list[KernelTime]:
    return [
        KernelTime(op.key, op.count, op.self_cpu_time_total / 1e3)
        for op in profiler.key_averages()
        if op.self_cpu_time_total > 0
    ]
