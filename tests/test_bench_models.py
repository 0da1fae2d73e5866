"""`kernelwright bench model`: it times what is right, and says what is not."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from kernelwright.bench import models as bench
from kernelwright.cli import app
from kernelwright.inject import fusions

TINY = ["--tiny", "--device", "cpu", "--dtype", "float32", "--seconds", "0.01"]


def invoke(*args):
    return CliRunner().invoke(app, ["bench", "model", *args], env={"COLUMNS": "200"})


def test_a_row_for_each_configuration(tmp_path):
    out = tmp_path / "new" / "models.json"
    result = invoke("ltx-video", *TINY, "--config", "eager,exact,fused", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "ltx-video" in result.output
    written = json.loads(out.read_text())
    assert written["kind"] == "models"
    assert {"gpu", "torch", "commit", "command"} <= written["environment"].keys()
    eager, exact, fused = written["rows"]
    assert eager["equal"]
    assert exact["equal"]
    assert exact["sites"]["QK-norm + RoPE"]["fused"]
    assert fused["error"] <= 1e-5
    assert all(row["ms"] > 0 and row["first_s"] > 0 for row in written["rows"])


def test_what_is_wrong_has_no_time(monkeypatch):
    right = fusions.GATED_RESIDUAL

    def wrong(*args, **how):
        return right(*args, **how) * 1.01

    monkeypatch.setattr(fusions, "GATED_RESIDUAL", wrong)
    monkeypatch.setattr(bench.contract, "holds", lambda *a, **k: False)
    result = invoke("ltx-video", *TINY, "--config", "eager,fused", "--json")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)
    assert "ms" in rows[0]
    assert "ms" not in rows[1]
    assert "error" in rows[1]["failed"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["ltx-vidio"], "ltx-video"),
        (["ltx-video", "--config", "exakt"], "exact"),
        (["ltx-video", "--tokens", "4"], "tokens"),
        (["ltx-video", "--dtype", "int8"], "bfloat16"),
        (["ltx-video", "--out", "/proc/nothing/here.json"], "cannot be written"),
    ],
    ids=lambda v: v[-1] if isinstance(v, list) else "",
)
def test_bad_input_gets_one_clear_line(args, said):
    result = invoke(*args, "--tiny")
    assert result.exit_code == 2
    assert said in result.output


def test_compiled_by_block_and_undone(monkeypatch):
    compiled = []

    def stand_in(module):
        compiled.append(module)
        module._compiled_call_impl = module._call_impl

    monkeypatch.setattr(nn.Module, "compile", stand_in)
    how = {"tiny": True, "device": "cpu", "dtype": torch.float32, "seconds": 0.01}
    rows = bench.measure("llama-3-8b", ["eager", "compile"], **how)
    assert [row["config"] for row in rows] == ["eager", "compile"]
    assert {type(m).__name__ for m in compiled} == {"LlamaDecoderLayer"}
    assert all(m._compiled_call_impl is None for m in compiled)
