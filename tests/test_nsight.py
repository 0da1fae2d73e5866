"""Levels 2 and 3: the arguments of nsys and ncu, and the parsing of their output."""

import io
import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from kernelwright.profiling import level1, nsight
from kernelwright.profiling.advice import Counters, advice
from kernelwright.profiling.categories import KernelTime
from kernelwright.profiling.kernel_tables import page
from kernelwright.profiling.our_kernels import pattern
from kernelwright.profiling.workload import Workload

NSYS = """\
Generating SQLite file forward.sqlite from forward.nsys-rep
Processing [forward.sqlite] with [/opt/nsys/reports/cuda_gpu_kern_sum.py]...
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
80.0,8000000,4,2000000.0,2000000.0,1900000,2100000,8164.9,nvjet_sm90_tst_176x128
15.0,1500000,3,500000.0,500000.0,490000,510000,100.0,"void f<int, float>(int, float)"
5.0,500000,2,250000.0,250000.0,250000,250000,0.0,kernelwright_row

Processing [forward.sqlite] with [/opt/nsys/reports/cuda_gpu_mem_time_sum.py]...
Time (%),Total Time (ns),Count,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Operation
100.0,2000,1,2000.0,2000.0,2000,2000,0.0,[CUDA memset]

"""


def test_the_tables_of_nsys_are_read():
    assert nsight.parse_nsys(NSYS) == [
        KernelTime("nvjet_sm90_tst_176x128", 4, 8.0),
        KernelTime("void f<int, float>(int, float)", 3, 1.5),
        KernelTime("kernelwright_row", 2, 0.5),
        KernelTime("[CUDA memset]", 1, 0.002),
    ]
    with_commas = NSYS.replace("kernelwright_row", "k").replace("500000,2,", '"500,000",2,')
    assert nsight.parse_nsys(with_commas)[2] == KernelTime("k", 2, 0.5)
    assert nsight.parse_nsys("SKIPPED: forward.sqlite does not contain CUDA kernel data.\n") == []


NCU_COLUMNS = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def ncu_line(launch, metric, unit, value, kernel="kernelwright_row", grid="(2688, 1, 1)"):
    return (
        f'"{launch}","7","python","127.0.0.1","{kernel}","1","7","(256, 1, 1)","{grid}","0","9.0",'
        f'"Command line profiler metrics","{metric}","{unit}","{value}"'
    )


def ncu_text():
    limits = nsight.BLOCK_LIMITS
    return "\n".join(
        [
            "==PROF== Connected to process 7 (python)",
            '==PROF== Profiling "kernelwright_row" - 0: 0%....100% - 3 passes',
            NCU_COLUMNS,
            ncu_line(0, nsight.US, "ns", "10,000"),
            ncu_line(0, nsight.DRAM_RATE, "byte/second", "3,000,000,000,000"),
            ncu_line(0, nsight.DRAM_PERCENT, "%", "62.5"),
            ncu_line(0, nsight.COMPUTE_PERCENT, "%", "20"),
            ncu_line(0, nsight.OCCUPANCY, "%", "30"),
            ncu_line(0, nsight.THEORETICAL, "%", "37.5"),
            ncu_line(0, nsight.REGISTERS, "register/thread", "80"),
            ncu_line(0, nsight.WAVES, "", "6.8"),
            ncu_line(0, limits["registers"], "block", "3"),
            ncu_line(0, limits["shared memory"], "block", "16"),
            ncu_line(0, limits["blocks"], "block", "32"),
            ncu_line(0, limits["warps"], "block", "8"),
            ncu_line(1, nsight.US, "ns", "12,000"),
            ncu_line(1, nsight.DRAM_PERCENT, "%", "n/a"),
            ncu_line(2, nsight.US, "ns", "2,000", grid="(2, 1, 1)"),
            "==PROF== Disconnected from process 7",
        ]
    )


def test_the_counters_of_ncu_are_read():
    row, short = nsight.parse_ncu(ncu_text())
    assert (row.name, row.grid, row.launches) == ("kernelwright_row", "(2688, 1, 1)", 2)
    assert row.us == pytest.approx(11.0)
    assert row.dram_gbs == pytest.approx(3000.0)
    assert row.dram_percent == 62.5
    assert (row.occupancy, row.theoretical_occupancy) == (30.0, 37.5)
    assert row.limiter == "registers"
    assert "registers" in advice(row)
    assert (short.launches, short.dram_gbs, short.limiter) == (1, None, None)
    assert nsight.parse_ncu("==WARNING== No kernels were profiled.\n") == []


def test_the_columns_of_newer_and_the_lines_of_several_processes_are_read():
    """ncu 2024 adds columns for rules after the value, and repeats the header for each process."""
    columns = NCU_COLUMNS + ',"Rule Name","Rule Type","Rule Description"'
    one = ncu_line(0, nsight.US, "ns", "10,000") + ',"","",""'
    rule = ncu_line(0, "", "", "") + ',"Bottleneck","INF","some words, with a comma"'
    other = one.replace('"7","python"', '"8","python"')
    (row,) = nsight.parse_ncu("\n".join([columns, one, rule, columns, other]))
    assert (row.name, row.launches, row.us) == ("kernelwright_row", 2, 10.0)


def counters(**changed):
    values = {"us": 50.0, "dram_percent": 40.0, "compute_percent": 30.0, "waves": 8.0}
    values |= {"occupancy": 90.0, "theoretical_occupancy": 100.0, "registers": 32.0}
    limits = {"registers": 8.0, "shared memory": 3.0, "blocks": 32.0, "warps": 8.0}
    known = {"name": "k", "grid": "", "block": "", "launches": 1, "dram_gbs": 1.0}
    return Counters(**{**known, **values, "block_limits": limits, **changed})


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"us": 2.0, "dram_percent": 90.0}, "graphs"),
        ({"dram_percent": 90.0}, "fewer bytes"),
        ({"compute_percent": 90.0}, "arithmetic"),
        ({"waves": 0.4}, "0.40 waves"),
        ({"theoretical_occupancy": 37.5}, "shared memory"),
        ({"occupancy": 60.0}, "unevenly"),
        ({}, "wider loads"),
        ({"dram_percent": None}, "too few counters"),
    ],
)
def test_advice_names_what_holds_a_kernel_back(changed, word):
    assert word in advice(counters(**changed))


def pretend_tool(monkeypatch, answer):
    """A fake tool on the path: `answer(command)` gives its exit code and output."""

    def run(command, **how):
        code, said = answer(command)
        return subprocess.CompletedProcess(command, code, stdout=said, stderr="")

    monkeypatch.setattr(nsight.shutil, "which", lambda name, path=None: f"/usr/bin/{name}")
    monkeypatch.setattr(nsight.subprocess, "run", run)


def after(command, option):
    return command[command.index(option) + 1]


def test_nsys_gives_the_rows_of_level_1(monkeypatch):
    def answer(command):
        if command[1] == "stats":
            return 0, NSYS
        assert after(command, "--capture-range") == "cudaProfilerApi"
        Path(after(command, "--output") + ".nsys-rep").write_text("report")
        return 0, ""

    pretend_tool(monkeypatch, answer)
    row = nsight.profile_nsys(Workload("ltx-video", tiny=True), "exact")
    assert (row["level"], row["config"], row["launches"]) == (2, "exact", 10)
    assert row["categories"]["GEMM"] == 8.0
    assert row["kernels"][0]["name"] == "nvjet_sm90_tst_176x128"


def test_ncu_looks_at_the_named_kernels_only(monkeypatch):
    def answer(command):
        assert after(command, "--kernel-name") == f"regex:{pattern()}"
        assert after(command, "--profile-from-start") == "off"
        assert after(command, "--clock-control") == "none"
        Path(after(command, "--log-file")).write_text(ncu_text())
        return 0, ""

    pretend_tool(monkeypatch, answer)
    rows = nsight.profile_ncu(Workload("ltx-video", tiny=True), "exact", pattern(), 50)
    assert [(r["level"], r["grid"], r["limiter"]) for r in rows] == [
        (3, "(2688, 1, 1)", "registers"),
        (3, "(2, 1, 1)", None),
    ]
    assert rows[1]["advice"].startswith("shorter than its launch")
    json.dumps(rows)


@pytest.mark.parametrize(
    ("said", "code", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", 1, "as root"),
        ("starting\nValueError: no size 'frames'", 1, "no size 'frames'"),
        ("==WARNING== No kernels were profiled.", 0, "no kernel of the forward matches"),
    ],
)
def test_what_ncu_says_when_it_cannot_is_passed_on(monkeypatch, said, code, message):
    def answer(command):
        Path(after(command, "--log-file")).write_text(said)
        return code, ""

    pretend_tool(monkeypatch, answer)
    with pytest.raises(nsight.CannotProfile, match=message):
        nsight.profile_ncu(Workload("ltx-video"), "exact", pattern(), 50)


def test_a_tool_beside_the_toolkit_is_found_off_the_path(monkeypatch):
    def which(name, path=None):
        return f"{path}/{name}" if path == nsight.TOOLKIT else None

    monkeypatch.setattr(nsight.shutil, "which", which)
    assert nsight._tool("ncu", Workload("ltx-video")) == "/usr/local/cuda/bin/ncu"


def test_the_tools_need_a_gpu(monkeypatch):
    pretend_tool(monkeypatch, lambda command: pytest.fail("nothing to run"))
    with pytest.raises(nsight.CannotProfile, match="nsys profiles CUDA GPUs"):
        nsight.profile_nsys(Workload("dit-xl", "cpu", tiny=True), "eager")
    with pytest.raises(nsight.CannotProfile, match="ncu profiles CUDA GPUs"):
        nsight.profile_ncu(Workload("dit-xl", "cpu", tiny=True), "exact", pattern(), 50)


def test_graph_breaks_and_advice_are_on_the_page():
    workload = Workload("dit-xl", "cpu", tiny=True)
    compiled = level1.summary(workload, "compile", [KernelTime("aten::mm", 3, 2.0)], level=1)
    compiled |= {"wall_ms": 1.0, "graph_breaks": {"graphs": 2, "breaks": 1, "reasons": {"why": 1}}}
    counted = {"level": 3, **workload.describe(), "config": "exact", "advice": "do less"}
    counted |= vars(counters()) | {"limiter": "warps"}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(page([compiled, counted]))
    text = console.export_text()
    for part in ("graphs 2, graph breaks 1", "1 × why", "do less", "90 of 100%", "warps"):
        assert part in text
