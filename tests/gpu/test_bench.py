"""`kernelwright bench` on a GPU: figures that can be true, and gates that hold."""

import json

import torch
from typer.testing import CliRunner

from kernelwright.cli import app
from kernelwright.measure.timing import Replay, copying
from kernelwright.ops.op import registry
from kernelwright.ops.plan import eager_plan

RMSNORM = registry()["rmsnorm"]


def invoke(*args):
    return CliRunner().invoke(app, ["bench", *args], env={"COLUMNS": "200"})


def test_every_way_of_a_case_has_its_figures():
    how = ["--device", "cuda", "--peers", "torch,compile", "--seconds", "0.02", "--json"]
    result = invoke("ops", "rmsnorm", "gated_residual_norm", "--preset", "ltx", *how)
    assert result.exit_code == 0, result.output
    for row in json.loads(result.stdout):
        exact = {way for way in row["gpu_us"] if way.startswith("exact:")}
        assert (
            {"triton", "cuda", "eager", "compile"} <= row["gpu_us"].keys() == row["host_us"].keys()
        )
        assert exact
        assert all(row["error"][way] > 0 for way in row["gpu_us"])
        # one kernel over tens of megabytes: near a copy, and no faster than memory can be
        assert 0.4 < row["of_copy"][row["chosen"]] < 1.5
        assert row["over"]["eager"] > 1


def test_a_copy_reaches_the_bandwidth_of_memory_not_of_the_cache():
    moved = 64 << 20
    us = Replay(copying(moved, torch.device("cuda")))()
    properties = torch.cuda.get_device_properties(0)
    if hasattr(properties, "memory_bus_width"):
        # two transfers a clock; the driver gives kilohertz
        peak = 2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8
        assert 0.3 * peak < moved / us * 1e6 < 1.02 * peak


def test_a_fallback_that_nobody_asked_for_fails_the_run(monkeypatch):
    monkeypatch.setattr(
        RMSNORM, "launch_plan", lambda args, out, how, alignment=16: eager_plan(RMSNORM, how)
    )
    monkeypatch.setattr(RMSNORM, "_plans", {})
    result = invoke("ops", "rmsnorm", "--shape", "64x2048", "--peers", "torch", "--seconds", "0")
    assert result.exit_code == 1
    assert "fell back to PyTorch" in result.output


def test_a_model_has_its_first_result_and_its_split():
    how = ["--tiny", "--device", "cuda", "--seconds", "0.05", "--config", "exact"]
    how += ["--first", "exact"]
    result = invoke("model", "ltx-video", *how, "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    # which of them is longer other tests decide that run beside this one
    assert row["cold_s"] > 0
    assert row["warm_s"] > 0
    assert row["split"]["GEMM"] > 0
    assert row["split"]["fused"] > 0
    assert row["peak_gib"] > 0


def test_torch_compile_as_one_graph_has_its_bits():
    how = ["ltx-video", "--tiny", "--device", "cuda", "--seconds", "0.02", "--json"]
    result = invoke("model", *how, "--config", "compile,compile+graphs")
    assert result.exit_code == 0, result.output
    alone, captured = json.loads(result.stdout)
    assert "failed" not in captured
    assert alone["error"] == captured["error"]
