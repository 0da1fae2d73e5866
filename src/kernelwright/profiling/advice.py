"""What limits a kernel, from ncu's counters, and one line of advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# a launch takes a few microseconds: for shorter kernels the launch is what counts
SHORT_US = 5.0
# a unit this busy is what limits the kernel; no kernel reaches 100% of DRAM's peak
BUSY_PERCENT = 75.0
# below this theoretical occupancy there are too few warps to hide memory latency
FEW_WARPS_PERCENT = 50.0
# achieved this far below theoretical occupancy: blocks end at different times
UNEVEN_POINTS = 20.0

LIMITS = {
    "registers": "fewer elements a thread, or __launch_bounds__ with more blocks",
    "shared memory": "smaller tiles or fewer stages",
    "blocks": "more threads a block",
    "warps": "a block size that divides the warps of an SM",
}


@dataclass(frozen=True)
class Counters:
    """One kernel at one grid: means over its launches. None where ncu gave no number."""

    name: str
    grid: str
    block: str
    launches: int
    us: float | None
    dram_gbs: float | None
    dram_percent: float | None
    compute_percent: float | None
    occupancy: float | None
    theoretical_occupancy: float | None
    registers: float | None
    waves: float | None
    block_limits: Mapping[str, float]  # how many blocks each resource allows on an SM

    @property
    def limiter(self) -> str | None:
        """The resource that allows the fewest blocks on an SM."""
        if not self.block_limits:
            return None
        return min(self.block_limits, key=lambda resource: self.block_limits[resource])


def advice(kernel: Counters) -> str:
    """The first of these that applies."""
    if _below(kernel.us, SHORT_US):
        return "shorter than its launch: use graphs, or fuse it with its neighbour"
    if _above(kernel.dram_percent, BUSY_PERCENT):
        return "at the speed of memory: only fewer bytes help, by fusing or a narrower dtype"
    if _above(kernel.compute_percent, BUSY_PERCENT):
        return "bound by arithmetic: cheaper functions, tensor cores, less work an element"
    if _below(kernel.waves, 1.0):
        return f"{kernel.waves:.2f} waves: blocks for the whole GPU, so fewer rows a block"
    if _below(kernel.theoretical_occupancy, FEW_WARPS_PERCENT) and kernel.limiter:
        return f"few warps, for want of {kernel.limiter}: {LIMITS[kernel.limiter]}"
    if kernel.occupancy is not None and kernel.theoretical_occupancy is not None:
        lost = kernel.theoretical_occupancy - kernel.occupancy
        if lost > UNEVEN_POINTS:
            return "blocks end unevenly: smaller blocks, or a persistent grid"
    if kernel.dram_percent is None or kernel.compute_percent is None:
        return "too few counters to tell"
    return "waits for memory without filling it: wider loads, more of them in flight a thread"


def _below(value: float | None, limit: float) -> bool:
    return value is not None and value < limit


def _above(value: float | None, limit: float) -> bool:
    return value is not None and value >= limit
