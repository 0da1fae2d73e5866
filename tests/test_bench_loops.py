"""`kernelwright bench loop`: skipped steps, and the same bits with and without injection."""

import json

import pytest
import torch
from typer.testing import CliRunner

from kernelwright.bench import loops
from kernelwright.cli import app
from kernelwright.measure import configs

TINY = ["--tiny", "--device", "cpu", "--dtype", "float32", "--seconds", "0", "--steps", "5"]


def invoke(*args):
    return CliRunner().invoke(app, ["bench", "loop", *args], env={"COLUMNS": "200"})


# the change of the first block of a tiny random model in some of five steps
@pytest.mark.parametrize(("preset", "threshold"), [("ltx-video", "0.6"), ("flux-dev", "0.9")])
def test_a_loop_is_timed_with_and_without_its_cache(preset, threshold, tmp_path):
    out = tmp_path / "loops.json"
    some = "eager,cache,exact,exact+cache"
    result = invoke(preset, *TINY, "--threshold", threshold, "--config", some, "--out", str(out))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["kind"] == "models"
    rows = {row["config"]: row for row in written["rows"]}
    assert all(row["equal"] and row["ms"] > 0 for row in rows.values())
    assert all(row["sizes"]["steps"] == 5 for row in rows.values())
    assert 0 < rows["cache"]["skipped"] < 5
    assert rows["exact+cache"]["skipped"] == rows["cache"]["skipped"]
    assert "skipped" not in rows["eager"]


def test_what_is_skipped_is_shown():
    result = invoke("ltx-video", *TINY, "--config", "cache", "--threshold", "100")
    assert result.exit_code == 0, result.output
    assert "skipped" in result.output
    assert " 4 " in result.output  # all but the first


def test_other_bits_than_the_cache_have_no_time(monkeypatch):
    kept = configs.injected

    def broken(model, **how):
        model.proj_out.register_forward_hook(lambda m, args, out: out * 1.5)
        return kept(model, **how)

    monkeypatch.setattr(configs, "injected", broken)
    result = invoke("ltx-video", *TINY, "--config", "cache,exact+cache", "--json")
    assert result.exit_code == 1
    cache, exact = json.loads(result.stdout)
    assert cache["ms"] > 0
    assert exact["failed"] == "exact+cache: not the bits of the cache alone"
    assert "ms" not in exact


@pytest.mark.parametrize("wrong", [["sdxl-unet"], ["--config", "fp8"]])
def test_what_there_is_no_loop_for_is_said_with_what_there_is(wrong):
    result = invoke(*wrong, *TINY)
    assert result.exit_code == 2
    assert "there are" in result.output


def test_the_cache_is_gone_afterwards():
    rows = list(
        loops.measure(
            "ltx-video",
            ["cache", "eager"],
            steps=3,
            threshold=100.0,
            tiny=True,
            device="cpu",
            dtype=torch.float32,
            seconds=0,
        )
    )
    assert [row.get("skipped") for row in rows] == [2, None]
