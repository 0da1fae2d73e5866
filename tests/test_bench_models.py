"""`kernelwright bench model`: times correct results, and reports wrong ones."""

import io
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from kernelwright import models
from kernelwright.bench import first_result
from kernelwright.bench import models as bench
from kernelwright.bench.models_table import table
from kernelwright.cli import app
from kernelwright.inject.fusions import norms as fusions
from kernelwright.measure import configs
from kernelwright.ops.attention import limits

TINY = ["--tiny", "--device", "cpu", "--dtype", "float32", "--seconds", "0.01"]

FIRST = ["--first", "eager"]


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
    monkeypatch.setattr(bench.accuracy, "holds", lambda *a, **k: False)
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
        (["ltx-video", "--frames", "50"], "8k + 1: 49 or 57"),
        (["wan-1.3b", "--frames", "8"], "4k + 1: 5 or 9"),
        (["ltx-video", "--height", "100"], "a multiple of 32"),
        (["ltx-video", "--device", "tpu"], "tpu"),
        (["ltx-video", "--dtype", "int8"], "bfloat16"),
        (["ltx-video", "--out", "/proc/nothing/here.json"], "cannot be written"),
    ],
    ids=lambda v: v[-1] if isinstance(v, list) else "",
)
def test_bad_input_gets_one_clear_line(args, said):
    result = invoke(*args, "--tiny")
    assert result.exit_code == 2
    assert said in result.output


def test_a_configuration_that_cannot_be_had_says_why_and_is_no_failure(monkeypatch):
    kept = configs.injected

    def none_of_that(model, **how):
        if how["numerics"] == "fp8":
            raise ValueError("inject: no fp8 on this GPU")
        return kept(model, **how)

    monkeypatch.setattr(configs, "injected", none_of_that)
    both = invoke("ltx-video", *TINY, "--config", "exact,fp8+graphs", "--json")
    assert both.exit_code == 0, both.output
    exact, fp8 = json.loads(both.stdout)
    assert "ms" in exact
    assert fp8["failed"] == "inject: no fp8 on this GPU"
    assert fp8["unavailable"]
    alone = invoke("ltx-video", *TINY, "--config", "fp8")
    assert alone.exit_code == 1
    assert "ltx-video fp8: inject: no fp8 on this GPU" in alone.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_graphs_of_torch_compile_need_a_gpu():
    result = invoke("ltx-video", *TINY, "--config", "eager,compile+graphs", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)[1]["failed"] == "CUDA graphs need a GPU"


def test_a_configuration_that_breaks_leaves_the_others_measured_and_written(monkeypatch, tmp_path):
    kept = configs.injected

    def broken(model, **how):
        if how["numerics"] == "exact":
            raise RuntimeError("no such kernel\nand more of it")
        return kept(model, **how)

    monkeypatch.setattr(configs, "injected", broken)
    out = tmp_path / "rows.json"
    done = invoke("ltx-video", *TINY, "--config", "eager,exact,fused", "--out", str(out))
    assert done.exit_code == 1
    assert "ltx-video exact: RuntimeError: no such kernel" in done.output
    eager, exact, fused = json.loads(out.read_text())["rows"]
    assert exact["failed"] == "RuntimeError: no such kernel"
    assert eager["ms"] > 0
    assert fused["ms"] > 0


def test_flash_attn_4_is_used_only_where_a_configuration_names_it(monkeypatch):
    monkeypatch.setattr(limits, "_fa4_installed", lambda: True)
    seen = {}
    kept = configs.injected

    def looked_at(model, **how):
        seen[how["numerics"], how["graphs"]] = limits.fa4_installed()
        return kept(model, **how)

    monkeypatch.setattr(configs, "injected", looked_at)
    done = invoke("wan-1.3b", *TINY, "--config", "fused,fused+fa4+graphs", "--json")
    assert done.exit_code == 0, done.output
    assert seen == {("fused", False): False, ("fused", True): True}
    assert limits.fa4_installed()

    monkeypatch.setattr(limits, "_fa4_installed", lambda: False)
    row = json.loads(invoke("wan-1.3b", *TINY, "--config", "eager,fp8+fa4+graphs", "--json").stdout)
    assert "kernelwright[attention]" in row[1]["failed"]
    assert row[1]["unavailable"]


class Ran:
    """The result of subprocess.run, and its arguments."""

    def __init__(self, returncode=0, stderr=""):
        self.returncode, self.stderr = returncode, stderr
        told = {"first_s": 1.5, "other_first_s": 0.5, "other_fourth_s": 0.25}
        self.stdout = f"warming up\n{json.dumps(told)}\n"
        self.commands, self.folders = [], []

    def __call__(self, command, env, **how):
        self.commands.append(command)
        folder = Path(env["KERNELWRIGHT_CACHE"])
        self.folders.append((folder, folder.exists()))
        folder.mkdir(exist_ok=True)
        return self


def test_the_first_result_is_timed_with_a_cold_and_then_a_warm_cache(monkeypatch):
    ran = Ran()
    monkeypatch.setattr(first_result.subprocess, "run", ran)
    result = invoke("ltx-video", *TINY, "--config", "eager", "--frames", "9", *FIRST, "--json")
    (row,) = json.loads(result.stdout)
    assert (row["cold_s"], row["warm_s"]) == (1.5, 1.5)
    assert (row["other_first_s"], row["other_fourth_s"]) == (0.5, 0.25)
    (cold, found), (warm, kept) = ran.folders
    assert cold == warm
    assert (found, kept) == (False, True)
    assert not cold.exists()
    options = ran.commands[0][ran.commands[0].index("ltx-video") :]
    wanted = "ltx-video --config eager --device cpu --dtype float32 --tiny --size frames=9"
    assert options == wanted.split()


def test_a_first_result_that_fails_keeps_the_other_figures(monkeypatch):
    monkeypatch.setattr(
        first_result.subprocess, "run", Ran(1, "Traceback\nMemoryError: too large\n")
    )
    result = invoke("ltx-video", *TINY, "--config", "eager", *FIRST, "--json")
    (row,) = json.loads(result.stdout)
    assert row["ms"] > 0
    assert "MemoryError: too large" in row["first_problem"]
    assert "MemoryError: too large" in result.stderr


def test_a_process_of_its_own_prints_the_seconds(monkeypatch, capsys):
    command = "first ltx-video --config exact --device cpu --dtype float32 --tiny --size frames=9"
    monkeypatch.setattr(sys, "argv", command.split())
    first_result.main()
    seconds = json.loads(capsys.readouterr().out)
    assert seconds.keys() == {"first_s", *first_result.OTHERS}
    assert all(0 < s < 60 for s in seconds.values())


def test_the_table_splits_the_time_by_kind():
    row = {"model": "flux-dev", "sizes": {}, "config": "eager", "ms": 170.0, "first_s": 3.0}
    row |= {"cold_s": 9.25, "warm_s": 4.5, "peak_gib": 24.0, "equal": True, "error": 1e-3}
    row["split"] = {"GEMM": 78.7, "attention": 23.5, "fused": 11.5, "other": 53.1}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table([row]))
    text = console.export_text()
    for cell in ("cold s", "9.2", "warm s", "4.5", "GiB", "24.0", "GEMM", "78.7", "other", "53.1"):
        assert cell in text


@pytest.mark.parametrize("strict", ["strict", "strict_pointwise", "strict_reduction"])
def test_strict_numerics_of_compile_are_a_peer_where_the_torch_has_them(monkeypatch, strict):
    options = []

    def stand_in(module, **how):
        options.append(how["options"])
        module._compiled_call_impl = module._call_impl

    monkeypatch.setattr(nn.Module, "compile", stand_in)
    how = {"tiny": True, "device": "cpu", "dtype": torch.float32, "seconds": 0.01}
    config = f"compile+{strict}"
    monkeypatch.setattr(configs, "has_compile_option", lambda name: False)
    (row,) = bench.measure("llama-3-8b", [config], **how)
    assert row["unavailable"]
    assert f"has no numerics '{strict}'" in row["failed"]
    monkeypatch.setattr(configs, "has_compile_option", lambda name: name == "numerics")
    (row,) = bench.measure("llama-3-8b", [config], **how)
    assert row["differing"] == 0
    assert options
    assert all(o == {"numerics": strict} for o in options)


def test_the_share_of_differing_elements():
    nan = float("nan")
    eager = [torch.tensor([1.0, nan, 3.0, 4.0]), torch.zeros(4)]
    assert bench.differing_share(eager, eager) == 0
    assert bench.differing_share([torch.tensor([1.0, nan, 3.5, nan]), eager[1]], eager) == 2 / 8
    assert bench.differing_share([torch.zeros(3), eager[1]], eager) is None


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


def test_all_presets_in_one_table(monkeypatch, tmp_path):
    """What is compared with torch.compile, with few layers; a model that fails is a row."""
    shown = {name: models.presets()[name] for name in ("llama-3-8b", "mochi", "dit-xl")}
    monkeypatch.setattr(models, "presets", lambda: shown)
    kept = models.build

    def broken(name, **how):
        if name == "mochi":
            raise torch.OutOfMemoryError("too large\nby far")
        return kept(name, **how)

    monkeypatch.setattr(models, "build", broken)
    asked = []

    def measured(model, inputs, config, *rest):
        asked.append((type(model).__name__, config))
        return {"ms": 1.0, "first_s": 1.0, "equal": True, "error": None}

    monkeypatch.setattr(bench, "_measure", measured)
    out = tmp_path / "all.json"
    done = invoke("--all", "--layers", "1", *TINY, "--out", str(out))
    assert done.exit_code == 1
    configs = ["eager", "compile", "compile+graphs", "exact+graphs", "fused+graphs", "fp8+graphs"]
    assert asked == [(c, n) for c in ("LlamaForCausalLM", "DiTTransformer2DModel") for n in configs]
    rows = json.loads(out.read_text())["rows"]
    assert [row["config"] for row in rows] == configs * 3
    assert {row["sizes"]["layers"] for row in rows} == {1}
    assert {row["failed"] for row in rows[6:12]} == {"the model: OutOfMemoryError: too large"}
    assert f"mochi {', '.join(configs)}: the model: OutOfMemoryError: too large" in done.output
    assert "leave their names out" in invoke("--all", "mochi").output


def test_layers_are_built_at_full_width():
    how = {"tiny": True, "device": "cpu", "dtype": torch.float32, "seconds": 0.01}
    (row,) = bench.measure("flux-dev", ["eager"], layers=1, with_error=False, **how)
    assert row["sizes"]["layers"] == 1
    assert invoke("flux-dev", "--layers", "0", *TINY).exit_code == 2


def test_nothing_is_started_when_the_time_is_over(monkeypatch):
    def measured(model, inputs, config, *rest):
        monkeypatch.setattr(bench.time, "monotonic", lambda: clock() + 3600)
        return {"ms": 1.0, "first_s": 1.0, "equal": True, "error": None}

    clock = bench.time.monotonic
    monkeypatch.setattr(bench, "_measure", measured)
    names = ["dit-xl", "llama-3-8b"]
    done = invoke(*names, *TINY, "--config", "eager,exact", "--minutes", "5", "--json")
    assert done.exit_code == 0, done.output
    first, *others = json.loads(done.stdout)
    assert first["ms"] == 1.0
    assert [(row["model"], row["config"]) for row in others] == [
        ("dit-xl", "exact"),
        ("llama-3-8b", "eager"),
        ("llama-3-8b", "exact"),
    ]
    assert {row["failed"] for row in others} == {"left out after 5 minutes"}


@pytest.mark.parametrize("name", ["mochi", "minimax-h3"])
def test_another_size_is_one_that_the_preset_takes(name, monkeypatch):
    asked = []
    monkeypatch.setattr(first_result, "configured", lambda model, *_: (lambda **given: None, None))
    kept = models.inputs
    monkeypatch.setattr(models, "inputs", lambda *a, **how: asked.append(how) or kept(*a, **how))
    how = {"tiny": True, "device": "cpu", "dtype": torch.float32}
    first_result.first_seconds(name, "eager", layers=1, **how)
    assert asked[1]["frames"] > models.presets()[name].tiny_sizes["frames"]


def test_programs_are_injected_without_recipes():
    how = {"tiny": True, "device": "cpu", "dtype": torch.float32, "seconds": 0.0}
    found = ("exact", "exact+programs")
    recipes, programs = bench.measure("ltx-video", found, with_error=False, **how)
    assert recipes["equal"]
    assert programs["equal"]
    assert "QK-norm + RoPE" in recipes["sites"]
    assert "QK-norm + RoPE" not in programs["sites"]
    assert configs.tier_of("fp8+programs+graphs") == "fp8"


def test_autotune_is_torch_compile_with_max_autotune(monkeypatch):
    """Without the graphs of that mode: the whole forward is captured as one by +graphs."""
    asked = []
    monkeypatch.setattr(torch, "compile", lambda model, **how: asked.append(how) or model)
    with ExitStack() as stack:
        for config in ("compile", "compile+autotune"):
            _, report = configs.configured(nn.Linear(2, 2), config, stack)
            assert report is None
    assert asked == [{}, {"mode": "max-autotune-no-cudagraphs"}]
    assert configs.tier_of("compile+autotune+graphs") is None


def test_torchao_is_a_peer_in_the_same_run_with_the_psnr_of_the_last_latents(monkeypatch):
    """Its float8 is stood in for: what is checked is which layers it gets, and what is compared."""
    # diffusers looks for torchao as it is imported, and must not find what stands in for it
    models.build("flux-dev", tiny=True, device="cpu", dtype=torch.float32)
    seen = []

    def quantize_(model, config, wanted):
        assert config == ("float8", "rows")
        for name, module in model.named_modules():
            if wanted(module, name):
                seen.append(name)
                module.weight.data = module.weight.data.to(torch.float8_e4m3fn).to(torch.float32)

    fake = ModuleType("torchao.quantization")
    fake.quantize_ = quantize_
    fake.PerRow = lambda: "rows"
    fake.Float8DynamicActivationFloat8WeightConfig = lambda granularity: ("float8", granularity)
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)
    how = {"tiny": True, "device": "cpu", "dtype": torch.float32, "seconds": 0.0}
    configs = ("eager", "fp8", "torchao")
    rows = list(bench.measure("flux-dev", configs, with_latents=True, **how))
    assert [row["config"] for row in rows] == list(configs), rows
    eager, ours, peer = rows
    assert "psnr" not in eager  # it has its own bits
    assert seen
    assert all("blocks" in name for name in seen)
    assert 0 < ours["psnr"] < 200
    assert 0 < peer["psnr"] < 200
    assert peer["error"] > eager["error"]
    assert eager["equal"]  # the peer works on a copy


def test_a_peer_that_is_not_installed_or_not_known_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    how = {"tiny": True, "device": "cpu", "dtype": torch.float32, "seconds": 0.0}
    (row,) = bench.measure("flux-dev", ("torchao+compile",), **how)
    assert "pip install torchao" in row["failed"]
    assert row["unavailable"]
    result = CliRunner().invoke(app, ["bench", "model", "flux-dev", "--tiny", "--peer", "unknown"])
    assert result.exit_code == 2
    assert "torchao" in result.output


class Recorder:
    """Captures on a machine without a GPU, or fails as CUDA does."""

    def __init__(self, fails):
        self.fails = fails

    def record(self, run, device):
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        return (lambda: None), run()


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_of_torch_compile_are_its_own_if_the_whole_cannot_be_captured(fails, monkeypatch):
    asked = []

    def compiled(model, stack, parts, own_graphs=False):
        asked.append(own_graphs)
        return model

    monkeypatch.setattr(configs, "_compiled", compiled)
    monkeypatch.setattr(configs, "CudaRecorder", lambda: Recorder(fails))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with ExitStack() as stack:
        run, report = configs.configured(torch.nn.Linear(2, 2), "compile+graphs", stack)
        x = torch.ones(3, 2)
        first = run(input=x)
        assert torch.equal(run(input=x), first)
        if not fails:  # a graph replays its inputs
            with pytest.raises(ValueError, match="captured with"):
                run(input=x.clone())
    assert report is None
    assert asked == ([False, True] if fails else [False])
    (said,) = run.graph_lines
    why = "torch.compile's own graphs: operation failed due to a previous error during capture"
    assert said == (why if fails else "1 graph")


def test_what_was_compiled_serves_graphs_too_and_is_undone_before_anything_else(monkeypatch):
    compiled, undone = [], []

    def compile_(model, stack, parts, own_graphs=False):
        compiled.append(parts)
        stack.callback(undone.append, parts)
        return model

    monkeypatch.setattr(configs, "_compiled", compile_)
    monkeypatch.setattr(configs, "CudaRecorder", lambda: Recorder(False))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, compilation, reused = torch.nn.Linear(2, 2), configs.Compilation(), []
    for config in ("compile", "compile+graphs", "compile+autotune", "eager"):
        with ExitStack() as stack:
            configs.configured(model, config, stack, compilation=compilation)
            reused.append(compilation.reused)
    assert compiled == [("compile",), ("compile", "autotune")]
    assert undone == compiled
    assert reused == [False, True, False, False]


def test_layers_that_are_not_in_fp8_are_told():
    shown = invoke("dit-xl", *TINY, "--config", "fp8", "--no-error")
    assert "dit-xl fp8: 12 layers not in fp8: fewer than 64 rows" in shown.output


def test_no_time_runs_backwards():
    refused = invoke("dit-xl", "--tiny", "--seconds", "-1")
    assert refused.exit_code == 2
    assert "--seconds" in refused.output
