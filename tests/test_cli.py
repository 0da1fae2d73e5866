"""The command line: output, exit codes, and that README.md is up to date."""

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from kernelwright import doctor, gpus
from kernelwright.cli import app
from kernelwright.ops import registry
from kernelwright.report import readme_tables

README = Path(__file__).parents[1] / "README.md"
NO_GPU = not torch.cuda.is_available()
SMI_GPUS = """\
GPU-a, 0, NVIDIA H200, 580.1, 9.0, 143771, 4, 0
GPU-b, 1, NVIDIA H200, 580.1, 9.0, 143771, 9000, 97
"""
SMI_APPS = "GPU-b, 4242\n"


def invoke(*args):
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "200"})


def pretend_smi(monkeypatch, listed=SMI_GPUS, apps=SMI_APPS, fails=""):
    """Install a fake nvidia-smi."""
    run = subprocess.run

    def answer(command, **how):
        if command[0] != "nvidia-smi":
            return run(command, **how)
        if fails:
            raise subprocess.CalledProcessError(9, command, output=fails)
        text = listed if "query-gpu" in command[1] else apps
        return subprocess.CompletedProcess(command, 0, stdout=text, stderr="")

    monkeypatch.setattr(gpus.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(gpus.subprocess, "run", answer)


@pytest.mark.parametrize(
    "command", [[], ["doctor"], ["ops"], ["models"], ["inspect"], ["demo"]], ids=" ".join
)
def test_help_teaches(command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_version():
    import kernelwright

    assert invoke("--version").output.strip() == kernelwright.__version__


def test_ops_lists_every_declared_op():
    result = invoke("ops")
    assert result.exit_code == 0
    for op in registry().values():
        assert op.name in result.output
        assert op.formula in result.output


def test_ops_json_holds_what_the_table_holds():
    listed = json.loads(invoke("ops", "--json").output)
    assert [o["name"] for o in listed] == list(registry())
    for o in listed:
        assert o["backends"][0] == "torch"
        assert set(o["dtypes"]) == {"float16", "bfloat16", "float32"}
        assert o["cases"]


@pytest.mark.parametrize("name", list(registry()))
def test_an_op_in_full_shows_signature_formula_and_cases(name):
    result = invoke("ops", name, "--json")
    assert result.exit_code == 0
    entry = json.loads(result.output)
    assert entry["signature"].startswith(f"{name}(")
    assert entry["doc"]
    assert entry["exact"] == list(registry()[name].exact)
    page = invoke("ops", name)
    assert page.exit_code == 0
    assert entry["doc"].splitlines()[0] in page.output


def test_an_unknown_op_suggests_the_nearest():
    result = invoke("ops", "rmsnrom")
    assert result.exit_code == 2
    assert "rmsnorm" in result.output


def test_readme_holds_the_tables(tmp_path):
    copy = tmp_path / "README.md"
    copy.write_text(README.read_text())
    readme_tables.update(copy, README.parent / "results")
    assert copy.read_text() == README.read_text(), "README.md is behind: run `make docs`"


@pytest.mark.skipif(not NO_GPU, reason="says what a machine without a GPU gets")
def test_doctor_without_a_gpu_is_usable_and_says_so(monkeypatch):
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    result = invoke("doctor")
    assert result.exit_code == 0
    assert "ops run in plain PyTorch, right but not faster" in result.output
    for name in registry():
        assert name in result.output


def test_doctor_json_is_complete():
    report = json.loads(invoke("doctor", "--json").output)
    assert {o["op"] for o in report["ops"]} == set(registry())
    assert report["torch"] == torch.__version__
    assert isinstance(report["cache_writable"], bool)
    assert report["usable"] == (report["problem"] is None)


@pytest.mark.skipif(not NO_GPU, reason="needs a torch that sees no GPU")
def test_doctor_names_the_remedy_when_torch_cannot_use_the_gpu(monkeypatch):
    pretend_smi(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "built without CUDA: pip install" in result.output

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "update the driver" in doctor.examine().problem
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in doctor.examine().problem


def test_doctor_tells_idle_gpus_from_busy_ones(monkeypatch):
    pretend_smi(monkeypatch)
    idle, busy = doctor.examine().gpus
    assert idle.idle is True
    assert busy.idle is False
    pretend_smi(monkeypatch, listed=SMI_GPUS.replace("9000, 97", "[N/A], [N/A]"))
    assert doctor.examine().gpus[1].idle is None


def test_doctor_survives_a_broken_nvidia_smi(monkeypatch):
    pretend_smi(monkeypatch, fails="NVIDIA-SMI has failed\n")
    assert doctor.examine().driver is None


def test_doctor_notes_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(doctor.KernelCache, "default", lambda: doctor.KernelCache(blocked / "x"))
    report = doctor.examine()
    assert not report.cache_writable
    assert any("KERNELWRIGHT_CACHE" in n for n in report.notes)


def test_doctor_says_whether_unnamed_configurations_of_cublaslt_are_tried(capsys):
    report = doctor.examine()
    assert (report.cublaslt is None) == (report.torch_gpus == 0)
    line = "configurations that cuBLASLt does not name are not tried: another version"
    Console(width=200).print(doctor.page(dataclasses.replace(report, cublaslt=line)))
    assert line in capsys.readouterr().out


def test_doctor_notes_a_cache_that_others_may_write_to(monkeypatch, tmp_path):
    tmp_path.chmod(0o777)
    monkeypatch.setattr(doctor.KernelCache, "default", lambda: doctor.KernelCache(tmp_path))
    report = doctor.examine()
    assert not report.cache_writable
    assert any(f"chmod go-w {tmp_path}" in n for n in report.notes)


def test_demo_without_diffusers_names_the_extra(monkeypatch):
    from kernelwright import demo

    monkeypatch.setattr(demo, "installed", lambda module: False)
    result = invoke("demo")
    assert result.exit_code == 1
    assert "kernelwright[models]" in result.output


def test_demo_refuses_a_device_that_is_not_there():
    pytest.importorskip("diffusers")
    result = invoke("demo", "--device", "cuda:99")
    assert result.exit_code == 2
    assert "cuda:99" in result.output


def test_demo_generates_the_same_frames(tmp_path, monkeypatch):
    from kernelwright import demo

    pytest.importorskip("diffusers")
    monkeypatch.setattr(demo, "TINY", dataclasses.replace(demo.TINY, height=32, width=32))
    monkeypatch.setattr(demo, "STEPS", 2)
    picture = tmp_path / "frames.png"
    result = invoke("demo", "--device", "cpu", "--save", str(picture), "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    eager, exact, fused, restored = shown["rows"]
    assert eager["equal"]
    assert exact["equal"]
    assert restored["equal"]
    assert not fused["equal"]
    assert shown["report"]["sites"]["QK-norm + RoPE"]["fused"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_inspect_shows_the_architecture():
    result = invoke("inspect", "ltx-video", "--json")
    assert result.exit_code == 0, result.output
    rows = {r["where"]: r for r in json.loads(result.stdout)["modules"]}
    assert rows["transformer_blocks.*.norm1"]["count"] == 28
    assert rows["transformer_blocks.*.norm1"]["weight"] is False
    assert rows["transformer_blocks.*.attn1.norm_q"]["weight"] is True
    assert rows["transformer_blocks.*.attn1.norm_q"]["replaced_by"] == "in LTXAttention"
    assert rows["transformer_blocks.*.ff"]["replaced_by"].startswith("GELU in one kernel")
    assert rows["time_embed"]["left_alone"] == "no recipe for it"
    page = invoke("inspect", "llama-3-8b", "--tiny")
    assert page.exit_code == 0
    assert "LlamaRMSNorm" in page.output


def test_inspect_shows_programs():
    page = invoke("inspect", "ltx-video", "--tiny", "--programs", "--cuda").output
    assert "LTXVideoTransformerBlock: 48 ops between GEMMs and attention become 10 programs" in page
    assert "= linear(" in page
    assert "__global__" in page
    refused = invoke("inspect", "a/b", "--programs")
    assert refused.exit_code != 0
    assert "shown for presets" in refused.output
    refused = invoke("inspect", "ltx-video", "--programs", "--numerics", "fast")
    assert refused.exit_code != 0
    assert "none of exact, fused, fp8" in refused.output


def test_inspect_shows_the_programs_of_a_tier():
    exact, fused, fp8 = (
        invoke("inspect", "ltx-video", "--programs", "--cuda", "--numerics", numerics).output
        for numerics in ("exact", "fused", "fp8")
    )
    assert "linear_gelu(" in fused
    assert "FreeRms" in fused
    assert "TorchRms" in exact
    assert "in F.rms_norm's order" in exact
    assert "in any order" in fused
    assert "linear_of_activation(" in fp8
    assert "and as rows in fp8" in fp8
    assert "write_eight" in fp8
    assert "write_eight" not in exact + fused


def test_inspect_of_a_name_that_is_nothing():
    result = invoke("inspect", "ltx-vidio")
    assert result.exit_code != 0
    assert "ltx-video" in result.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["inspect", "flux-dev", "--cuda"], "--programs"),
        (["inspect", "flux-dev", "--numerics", "exacct"], "exact, fused, fp8"),
        (["demo", "--save", "picture.txt"], ".png or .jpg"),
        (["bench", "model", "ltx-video", "--tiny", "--config", "eager,"], "names nothing"),
        (["bench", "train", "llama-3-8b", "--tiny", "--tokens", "1"], "at least 2"),
    ],
)
def test_what_cannot_be_done_is_said_before_any_work(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*words)
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())


def test_models_are_listed():
    names = [m["name"] for m in json.loads(invoke("models", "--json").stdout)]
    assert {"ltx-video", "flux-dev", "llama-3-8b"} <= set(names)
    assert "flux-dev" in invoke("models").output
