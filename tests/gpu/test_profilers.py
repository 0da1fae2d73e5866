"""The three levels of `kernelwright profile` on a GPU: torch.profiler, nsys and ncu."""

import re

import pytest

from kernelwright.profiling import level1, nsight
from kernelwright.profiling.our_kernels import pattern
from kernelwright.profiling.workload import Workload

TINY = Workload("ltx-video", "cuda", tiny=True)
LACKS = r"is not installed|may not read the GPU's counters"


def or_skip(profile, *args):
    """What a tool saw; a skip where this machine has none, or forbids it."""
    try:
        return profile(TINY, "exact", *args)
    except nsight.CannotProfile as lack:
        if not re.search(LACKS, str(lack)):
            raise
        pytest.skip(str(lack))


@pytest.mark.parametrize("config", ["exact", "exact+graphs"])
def test_our_kernels_are_seen(config):
    row = level1.profile(TINY, config)
    ours = {k["name"] for k in row["kernels"] if k["ours"]}
    assert {"kernelwright_row", "kernelwright_rope"} <= ours
    assert row["categories"]["GEMM"] > 0
    assert row["categories"]["attention"] > 0
    assert not any(name.startswith("aten::") for name in ours)


def test_nsys_sees_the_launches_that_torch_sees():
    seen = or_skip(nsight.profile_nsys)
    calls = {k["name"]: k["calls"] for k in level1.profile(TINY, "exact")["kernels"] if k["ours"]}
    assert calls
    assert {k["name"]: k["calls"] for k in seen["kernels"] if k["ours"]} == calls


def test_ncu_counts_what_our_kernels_do():
    rows = or_skip(nsight.profile_ncu, pattern(), 10)
    assert sum(row["launches"] for row in rows) == 10
    for row in rows:
        assert row["name"].startswith("kernelwright_")
        assert row["us"] > 0
        assert 0 <= row["dram_percent"] <= 100
        assert 0 < row["occupancy"] <= 100
        assert 0 < row["theoretical_occupancy"] <= 100
        assert row["limiter"] in ("registers", "shared memory", "blocks", "warps")
        assert row["advice"]
