"""`kernelwright bench train`: times of a step, and which gradients and losses are eager's."""

import json
import os
from contextlib import ExitStack

import pytest
import torch
from result_files import TRAINING, invoked, training_row
from torch import nn
from typer.testing import CliRunner

from kernelwright.bench import training, training_setup
from kernelwright.bench.training_setup import deterministic
from kernelwright.cli import app
from kernelwright.commands.report import compare, report
from kernelwright.measure import configs

TINY = ["--tiny", "--device", "cpu", "--seconds", "0", "--steps", "3"]
LLAMA = ["llama-3-8b", "--tokens", "8", *TINY]
LTX = ["ltx-video", "--frames", "9", "--height", "32", "--width", "32", "--batch-size", "1", *TINY]


def invoke(*args):
    return CliRunner().invoke(app, ["bench", "train", *args], env={"COLUMNS": "200"})


def test_every_configuration_has_a_row_with_a_time_or_a_reason(tmp_path):
    out = tmp_path / "training.json"
    result = invoke(*LLAMA, "--config", "eager,fused,liger", "--out", str(out))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["kind"] == "training"
    eager, fused, liger = written["rows"]
    assert eager["gradients_equal"] == eager["gradients"] == 21
    assert eager["losses_equal"] == eager["losses"] == 3
    assert eager["ms"] > 0
    assert fused["ms"] > 0
    assert 0 < fused["error"] < 1e-4
    assert liger["unavailable"]
    assert "Liger" in liger["failed"]
    assert "21 of 21" in result.output
    page = tmp_path / "page.html"
    assert invoked(report)(out, "--html", page).exit_code == 0
    assert "Training" in page.read_text()


def test_a_model_whose_preset_wants_the_last_logits_alone_is_trained_on_all():
    small = ("gemma-3-12b", "--tokens", "8", *TINY, "--steps", "1", "--no-error", "--json")
    result = invoke(*small, "--config", "eager")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["gradients_equal"] == row["gradients"] > 20


def test_lora_trains_adapters_alone_with_checkpointing_and_a_chosen_attention():
    options = ("--lora", "4", "--checkpointing", "--attention", "math", "--no-error", "--json")
    result = invoke(*LTX, *options, "--config", "eager,fused")
    assert result.exit_code == 0, result.output
    for row in json.loads(result.stdout):
        assert row["ms"] > 0
        # two factors around four projections of two attentions
        assert row["gradients"] % 16 == 0
        assert row["lora"] == 4
        assert row["checkpointing"]
        assert row["attention"] == "math"


@pytest.mark.parametrize(("config", "code"), [("compile", 0), ("exact", 1)])
def test_a_peer_that_pytorch_cannot_run_is_no_failure(config, code, monkeypatch):
    usual = configs.configured

    def configured(model, name, *rest, **more):
        if name == config:
            raise RuntimeError("not today")
        return usual(model, name, *rest, **more)

    monkeypatch.setattr(configs, "configured", configured)
    result = invoke(*LLAMA, "--no-error", "--config", f"eager,{config}")
    assert result.exit_code == code
    assert "not today" in result.output


def test_exact_gradients_that_are_not_eagers_have_no_time(monkeypatch):
    kept = configs.injected

    def broken(model, **how):
        # the loss stays, the gradient does not
        model.lm_head.weight.register_hook(lambda grad: grad * 1.5)
        return kept(model, **how)

    monkeypatch.setattr(configs, "injected", broken)
    result = invoke(*LLAMA, "--config", "eager,exact", "--no-error", "--json")
    assert result.exit_code == 1
    eager, exact = json.loads(result.stdout)
    assert eager["ms"] > 0
    assert exact["failed"].endswith("gradients are not eager's, lm_head.weight the first by name")
    assert "ms" not in exact


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_graphs_are_columns_that_say_why_there_are_none():
    result = invoke(*LLAMA, "--config", "compile+graphs,exact+graphs", "--no-error", "--json")
    assert result.exit_code == 0, result.output
    compiled, exact = json.loads(result.stdout)
    assert compiled["failed"] == "CUDA graphs need a GPU"
    assert exact["ms"] > 0
    assert exact["gradients_equal"] == exact["gradients"]
    (line,) = [line for line in exact["graphs"] if "while gradients are recorded" in line]
    assert "inputs on cpu" in line
    assert {"compile+graphs", "exact+graphs", "fused+graphs"} < set(training.DEFAULT)


def test_torch_compile_has_its_own_graphs_where_a_model_is_trained(monkeypatch):
    asked, begun = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))

    def compiled(model, **how):
        asked.append(how)
        return lambda **inputs: inputs

    monkeypatch.setattr(torch, "compile", compiled)
    with ExitStack() as stack:
        run, _ = configs.configured(nn.Linear(2, 2), "compile+graphs", stack, trains=True)
        assert run(x=1) == {"x": 1}
    assert asked == [{"mode": "reduce-overhead"}]
    assert begun == [1]


def test_losses_are_counted_up_to_the_first_that_differs():
    def trained(*losses):
        return training.Trained([torch.tensor(x) for x in losses], {}, 0.0)

    assert trained(1.0, 2.0, 3.0).same_losses(trained(1.0, 2.0, 3.0)) == 3
    assert trained(1.0, 2.0, 3.0).same_losses(trained(1.0, 2.5, 3.0)) == 1


def test_a_gradient_that_eager_does_not_repeat_is_not_asked_for():
    row = {"gradients": 2, "losses_equal": 0, "losses_repeated": 0}
    training._check("exact", row, set())
    with pytest.raises(training.Wrong, match="1 of 2 gradients are not eager's, a the first"):
        training._check("exact", row, {"a"})
    training._check("fused", row, {"a"})


def test_training_with_deterministic_algorithms_leaves_the_switches_as_they_were():
    before = torch.are_deterministic_algorithms_enabled()
    model = nn.Linear(4, 4)
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        model(torch.ones(1, 4)).sum().backward()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_pytorchs_workspace_variable_is_set_for_one_product_alone(monkeypatch):
    """As long as it is set, PyTorch may parse it at every product."""
    name, seen, gpu = training_setup.WORKSPACE, [], torch.device("cuda")
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *size, **how: how["device"])
    monkeypatch.setattr(torch, "mm", lambda a, b: seen.append((a, os.environ.get(name))))
    training_setup.promise_deterministic_products(torch.device("cpu"))
    assert (seen, os.environ.get(name)) == ([], None)
    training_setup.promise_deterministic_products(gpu)
    assert (seen, os.environ.get(name)) == ([(gpu, ":4096:8")], None)
    monkeypatch.setenv(name, ":16:8")  # the user's own stays: its workspace is smaller than usual
    training_setup.promise_deterministic_products(gpu)
    assert (len(seen), os.environ[name]) == (1, ":16:8")


@pytest.mark.parametrize("name", training_setup.ATTENTION)
def test_the_order_of_attention_kernels_stays_pytorchs_own(name, monkeypatch):
    """It finds one for the GPU at the first attention there: see `repeatable`."""
    monkeypatch.delattr(torch._C, "_set_sdp_priority_order")
    for chosen in (training_setup.repeatable(name), training_setup.attention(name)):
        with chosen:
            pass


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--config", "fastest"], "no configuration 'fastest'"),
        (["--attention", "best"], "expected any of default, math"),
        (["--lora", "0"], "expected a rank of 1 or more"),
    ],
)
def test_a_wrong_option_is_named(wrong, said):
    result = invoke(*LLAMA, *wrong)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_the_page_shows_gradients_losses_and_speed(written, tmp_path):
    failed = {"failed": "exact: 3 of 448 gradients are not eager's", "ms": None}
    other = training_row("exact", lora=None) | failed
    page = tmp_path / "page.html"
    written("training", *TRAINING, other)
    assert invoked(report)(tmp_path, "--html", page).exit_code == 0
    text = page.read_text()
    for said in (
        "LoRA rank 64",
        "448 of 448",
        "20 of 20",
        "1.60×",
        "3 of 448 gradients",
        "Failed: training",
    ):
        assert said in text, said


def test_gradients_that_are_no_longer_equal_are_a_regression(written):
    before = written("training", *TRAINING, name="before.json")
    lost = training_row("exact", 125.0, gradients_equal=447)
    after = written("training", TRAINING[0], lost, TRAINING[2], name="after.json")
    result = invoked(compare)(before, after)
    assert result.exit_code == 1
    assert "no longer equal" in result.output
