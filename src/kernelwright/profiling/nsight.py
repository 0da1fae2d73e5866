"""Levels 2 and 3: runs nsys and ncu on one forward in its own process, and parses their output."""

from __future__ import annotations

import csv
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from .advice import Counters, advice
from .categories import KernelTime
from .level1 import summary
from .workload import Workload

PACKAGES = {"nsys": "nsight-systems", "ncu": "nsight-compute"}
# where the CUDA toolkit puts its tools, often not on the PATH
TOOLKIT = "/usr/local/cuda/bin"
# a whole model is built and warmed up under the tool, and ncu replays every kernel several times
TIMEOUT_S = 1800

US = "gpu__time_duration.sum"
DRAM_RATE = "dram__bytes.sum.per_second"
DRAM_PERCENT = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
COMPUTE_PERCENT = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
THEORETICAL = "sm__maximum_warps_per_active_cycle_pct"
REGISTERS = "launch__registers_per_thread"
WAVES = "launch__waves_per_multiprocessor"
BLOCK_LIMITS = {
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "blocks": "launch__occupancy_limit_blocks",
    "warps": "launch__occupancy_limit_warps",
}
METRICS = (
    *(US, DRAM_RATE, DRAM_PERCENT, COMPUTE_PERCENT, OCCUPANCY, THEORETICAL, REGISTERS, WAVES),
    *BLOCK_LIMITS.values(),
)


class CannotProfile(RuntimeError):
    """A level cannot run here; the message says what is missing."""


def profile_nsys(workload: Workload, config: str) -> dict[str, Any]:
    """Level 2: the row of level 1, with the times of nsys."""
    nsys = _tool("nsys", workload)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "forward.nsys-rep"
        _run(
            [
                *(nsys, "profile", "--trace", "cuda", "--sample", "none", "--cpuctxsw", "none"),
                *("--capture-range", "cudaProfilerApi", "--capture-range-end", "stop"),
                *("--cuda-graph-trace", "node", "--output", str(report.with_suffix(""))),
                *workload.command(config),
            ]
        )
        if not report.is_file():
            raise CannotProfile("nsys recorded nothing: no report was written")
        reports = ("--report", "cuda_gpu_kern_sum", "--report", "cuda_gpu_mem_time_sum")
        shown = _run([nsys, "stats", *reports, "--format", "csv", str(report)])
    kernels = parse_nsys(shown)
    if not kernels:
        raise CannotProfile("nsys saw no kernel in the forward")
    return summary(workload, config, kernels, level=2)


def parse_nsys(text: str) -> list[KernelTime]:
    """Kernels and memory operations in the output of `nsys stats --format csv`."""
    found = []
    columns: list[str] | None = None
    for cells in csv.reader(text.splitlines()):
        if cells and cells[0] == "Time (%)":
            columns = cells
        elif columns is None or len(cells) != len(columns):
            columns = None
        else:
            row = dict(zip(columns, cells, strict=True))
            name = row.get("Name") or row["Operation"]
            calls = _number(row.get("Instances") or row["Count"])
            ns = _number(row["Total Time (ns)"])
            if calls is not None and ns is not None:
                found.append(KernelTime(name, int(calls), ns / 1e6))
    return found


def profile_ncu(
    workload: Workload, config: str, kernels: str, launches: int
) -> list[dict[str, Any]]:
    """Level 3: a row for each kernel whose name matches `kernels`, of the first `launches`."""
    ncu = _tool("ncu", workload)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            *(ncu, "--clock-control", "none", "--profile-from-start", "off"),
            *("--target-processes", "all", "--csv", "--print-units", "base"),
            *("--log-file", str(log), "--kernel-name", f"regex:{kernels}"),
            *("--launch-count", str(launches), "--metrics", ",".join(METRICS)),
            *workload.command(config),
        ]
        _run(command, log)
        counted = parse_ncu(log.read_text())
    if not counted:
        raise CannotProfile(f"{config}: no kernel of the forward matches {kernels!r}")
    return [
        {
            "level": 3,
            **workload.describe(),
            "config": config,
            **asdict(kernel),
            "limiter": kernel.limiter,
            "advice": advice(kernel),
        }
        for kernel in sorted(counted, key=lambda k: -(k.us or 0.0) * k.launches)
    ]


def parse_ncu(text: str) -> list[Counters]:
    """Kernels in the output of `ncu --csv --print-units base`: a line a launch and metric."""
    launches: dict[tuple[str, str, str], set[tuple[str, str]]] = defaultdict(set)
    values: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in _ncu_rows(text):
        kernel = (row["Kernel Name"], row["Grid Size"], row["Block Size"])
        launches[kernel].add((row["Process ID"], row["ID"]))
        value = _number(row["Metric Value"])
        if value is not None:
            values[kernel][row["Metric Name"]].append(value)
    return [_counters(kernel, len(ids), values[kernel]) for kernel, ids in launches.items()]


def _ncu_rows(text: str) -> Iterator[dict[str, str]]:
    """The lines by column name; each process starts with a line of names."""
    names: list[str] | None = None
    lines = (line for line in text.splitlines() if not line.startswith("=="))
    for cells in csv.reader(lines):
        if cells[:1] == ["ID"]:
            names = cells
        elif names is not None and len(cells) == len(names):
            yield dict(zip(names, cells, strict=True))


def _counters(
    kernel: tuple[str, str, str], launches: int, values: dict[str, list[float]]
) -> Counters:
    def mean(metric: str, unit: float = 1.0) -> float | None:
        return fmean(values[metric]) * unit if metric in values else None

    name, grid, block = kernel
    limits = {resource: mean(metric) for resource, metric in BLOCK_LIMITS.items()}
    return Counters(
        name=name,
        grid=grid,
        block=block,
        launches=launches,
        us=mean(US, 1e-3),
        dram_gbs=mean(DRAM_RATE, 1e-9),
        dram_percent=mean(DRAM_PERCENT),
        compute_percent=mean(COMPUTE_PERCENT),
        occupancy=mean(OCCUPANCY),
        theoretical_occupancy=mean(THEORETICAL),
        registers=mean(REGISTERS),
        waves=mean(WAVES),
        block_limits={r: limit for r, limit in limits.items() if limit is not None},
    )


def _number(text: str) -> float | None:
    """The number that a tool printed, with commas for thousands; None for words such as n/a."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _tool(name: str, workload: Workload) -> str:
    path = shutil.which(name) or shutil.which(name, path=TOOLKIT)
    if path is None:
        package = PACKAGES[name]
        raise CannotProfile(f"{name} is not installed: install NVIDIA's package {package}")
    if not workload.on_gpu:
        raise CannotProfile(f"{name} profiles CUDA GPUs, the device is {workload.device}")
    return path


def _run(command: list[str], log: Path | None = None) -> str:
    """The output of a command; an error with its last line, or that of `log`, if it fails."""
    tool = Path(command[0]).name
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise CannotProfile(f"{tool} did not end within {TIMEOUT_S} s") from None
    said = done.stdout + done.stderr
    if log is not None and log.is_file():
        said += log.read_text()
    if "ERR_NVGPUCTRPERM" in said:
        raise CannotProfile(
            f"{tool} may not read the GPU's counters: run as root, or load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    if done.returncode:
        words = [line for line in said.splitlines() if line.strip()]
        raise CannotProfile(f"{tool} failed: {words[-1] if words else done.returncode}")
    return done.stdout
