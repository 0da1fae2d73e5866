"""`kernelwright bench generate`: tokens a second of runs whose logits were compared."""

import json
import sys
from types import SimpleNamespace

import torch
from torch import nn
from typer.testing import CliRunner

from kernelwright.bench import generation, liger_kernels
from kernelwright.cli import app

TINY = ["--tiny", "--device", "cpu", "--dtype", "float32", "--seconds", "0.01"]
SHORT = ["--prompt", "5", "--new", "4"]


def invoke(*args):
    return CliRunner().invoke(app, ["bench", "generate", *args], env={"COLUMNS": "200"})


def test_each_configuration_has_the_bits_of_its_cache(tmp_path):
    out = tmp_path / "generate.json"
    how = ["--config", "eager,eager+static,exact,exact+graphs", "--out", str(out)]
    result = invoke("llama-3-8b", *TINY, *SHORT, *how)
    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["equal"] for row in rows] == [True] * 4
    assert all(row["tokens_per_s"] > 0 and row["first_token_ms"] > 0 for row in rows)
    assert rows[0]["sizes"] == {"batch_size": 1, "prompt": 5, "new_tokens": 4}


def test_other_logits_have_no_time(monkeypatch):
    usual, seen = generation._kept, []

    def one_bit_off(result):
        tokens, logits = usual(result)
        seen.append(logits)
        return tokens, torch.nextafter(logits, logits + 1) if len(seen) > 2 else logits

    monkeypatch.setattr(generation, "_kept", one_bit_off)
    result = invoke("llama-3-8b", *TINY, *SHORT, "--config", "exact", "--json")
    assert result.exit_code == 1
    (row,) = json.loads(result.stdout)
    assert row["failed"] == "exact: not the bits of eager with a dynamic cache"
    assert "ms" not in row


def test_a_peer_that_cannot_run_here_is_said_to_and_is_no_failure():
    result = invoke("llama-3-8b", *TINY, *SHORT, "--config", "eager,liger")
    assert result.exit_code == 0, result.output
    assert "Liger" in result.output
    assert invoke("llama-3-8b", *TINY, *SHORT, "--config", "liger").exit_code == 1


class Norm(nn.Module):
    def forward(self, x):
        return x


class Model(nn.Module):
    config = SimpleNamespace(model_type="made_up")

    def __init__(self):
        super().__init__()
        self.norm = Norm()

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=torch.device("cuda"))])


def test_liger_is_taken_off_again(monkeypatch):
    def apply(model):
        model.norm.forward = model.norm.eps = abs
        Norm.__name__, Norm.forward = "LigerNorm", abs

    known = SimpleNamespace(apply_liger_kernel_to_made_up=apply)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", known)
    monkeypatch.setattr(liger_kernels, "find_spec", lambda name: True)
    model, own = Model(), Norm.forward
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    with liger_kernels.liger(model):
        assert model.norm.forward is abs
    assert (Norm.__name__, Norm.forward) == ("Norm", own)
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before


def test_a_model_that_does_not_generate_is_named():
    result = invoke("ltx-video", *TINY)
    assert result.exit_code == 2
    assert "'ltx-video' is no preset that generates text" in result.output


def test_where_eager_differs_from_run_to_run_nothing_is_refused(monkeypatch):
    usual, seen = generation._kept, []

    def other_each_time(result):
        tokens, logits = usual(result)
        seen.append(logits)
        return tokens, logits + len(seen)

    monkeypatch.setattr(generation, "_kept", other_each_time)
    result = invoke("llama-3-8b", *TINY, *SHORT, "--config", "exact", "--json")
    assert result.exit_code == 0
    (row,) = json.loads(result.stdout)
    assert row["eager_repeats"] is False
    assert "eager varies" in invoke("llama-3-8b", *TINY, *SHORT, "--config", "exact").stdout
