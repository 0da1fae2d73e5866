"""The scripts of the skill: each prints its options, and runs on a CPU as its page says."""

import ctypes
import json
import runpy
import struct
import subprocess
import sys

import pytest
import torch

from kernelwright import skill
from kernelwright.backends import cuda
from kernelwright.checking import emulator
from kernelwright.checking.planned_kernels import usage

SCRIPTS = sorted(p.name for p in (skill.FOLDER / "scripts").glob("*.py"))


def run(monkeypatch, name, *options):
    """As `python NAME ...` would; returns the exit status."""
    path = skill.FOLDER / "scripts" / name
    monkeypatch.setattr(sys, "argv", [str(path), *options])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    return end.value.code


def test_they_have_the_names_that_the_skill_always_had():
    assert set(SCRIPTS) - {"foreign_kernel_example.py"} == {
        "bench_denoise.py",
        "benchmark_example.py",
        "benchmark_rmsnorm.py",
        "diffusion_env.py",
        "huggingface_kernels_example.py",
        "ltx_kernel_injection_example.py",
        "transformers_injection_example.py",
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_names_the_options(name, monkeypatch, capsys):
    assert run(monkeypatch, name, "--help") == 0
    said = capsys.readouterr().out
    assert "--help" in said
    assert any(option in said for option in ("--device", "--count"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_they_are_short_and_tell_how_they_are_run(name):
    lines = (skill.FOLDER / "scripts" / name).read_text().splitlines()
    assert len(lines) < 90
    assert lines[0].startswith('"""')
    assert any(line.strip().startswith(f"python {name}") for line in lines)


def test_a_foreign_kernel_is_an_op_of_pytorch(monkeypatch, capsys):
    assert run(monkeypatch, "foreign_kernel_example.py", "--device", "cpu") == 0
    assert "one graph under torch.compile" in capsys.readouterr().out


ENTRY = """
struct Args { const __nv_bfloat16 *x, *weight; __nv_bfloat16* y; int width; float eps; };
extern "C" __global__ void entry(const Args a) { rmsnorm_row(a.x, a.weight, a.y, a.width, a.eps); }
"""
HEADER = skill.FOLDER / "scripts" / "standalone_rmsnorm.cuh"


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_the_standalone_kernel_compiles(arch):
    pytest.importorskip("cuda.core")
    _, report = cuda.build(HEADER.read_text() + ENTRY, arch, verbose=True)
    (used,) = usage(report)
    assert used.clean


@pytest.mark.skipif(emulator.problem() is not None, reason="no g++")
def test_the_standalone_kernel_is_right(tmp_path):
    """Emulated: 96 threads for rows of 40 vectors, so that some threads have none."""
    launch = """
extern "C" void launch(const void* packed, int grid, int block) {
  static Args args;
  memcpy(&args, packed, sizeof args);
  launch_blocks([] { entry(args); }, grid, block);
}
"""
    source, library = tmp_path / "kernel.cpp", tmp_path / "kernel.so"
    text = emulator.included(HEADER.read_text(), set())
    source.write_text(emulator.GPU.read_text() + text + ENTRY + launch)
    subprocess.run(["g++", *emulator.FLAGS, "-o", library, source], check=True)
    x, weight = torch.randn(5, 320).bfloat16(), torch.randn(320).bfloat16()
    y = torch.empty_like(x)
    packed = struct.pack("@3Pif", *(t.data_ptr() for t in (x, weight, y)), 320, 1e-6)
    ctypes.CDLL(str(library)).launch(packed, 5, 96)
    expected = torch.nn.functional.rms_norm(x.float(), (320,), weight.float(), 1e-6)
    assert torch.equal(y, expected.bfloat16())


def test_a_language_model_keeps_its_bits(monkeypatch, capsys):
    assert run(monkeypatch, "transformers_injection_example.py", "--device", "cpu") == 0
    said = capsys.readouterr().out
    assert "LlamaDecoderLayer" in said
    assert "4 tokens generated" in said
    assert said.endswith("the bits of eager\nthe bits of eager again\n")


def test_a_pipeline_keeps_its_bits_and_is_restored(monkeypatch, capsys):
    options = ("--device", "cpu", "--steps", "2")
    assert run(monkeypatch, "ltx_kernel_injection_example.py", *options) == 0
    said = capsys.readouterr().out
    assert "LTXVideoTransformerBlock" in said
    assert "the bits of eager again" in said


def test_a_denoise_step_is_timed_and_written(monkeypatch, capsys, tmp_path):
    options = ("--tiny", "--device", "cpu", "--config", "eager,exact", "--seconds", "0")
    done = run(
        monkeypatch, "bench_denoise.py", *options, "--output-dir", str(tmp_path / "new"),
        "--model", "dit-xl", "--label", "before",
    )  # fmt: skip
    assert done == 0
    written = json.loads((tmp_path / "new" / "before.json").read_text())
    assert [row["config"] for row in written["rows"]] == ["eager", "exact"]
    assert all(row["ms"] > 0 and row["equal"] for row in written["rows"])
    assert "before.json" in capsys.readouterr().out


def test_the_preflight_knows_the_package_and_makes_a_folder(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "diffusion_env.py", "root") == 0
    assert capsys.readouterr().out.strip() == str(skill.FOLDER.parent)
    assert run(monkeypatch, "diffusion_env.py", "output-dir", "--kind", "profiles") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "outputs" / "profiles")
    assert (tmp_path / "outputs" / "profiles").is_dir()


def test_the_preflight_refuses_when_no_gpu_is_idle(monkeypatch):
    from kernelwright import gpus

    busy = gpus.Gpu(0, "H200", (9, 0), 141000, 9000, 80, 1)
    monkeypatch.setattr(gpus, "nvidia_smi", lambda: ("580", (busy,), None))
    assert "0 of 1 GPUs are idle" in run(monkeypatch, "diffusion_env.py", "idle-gpus")


def test_idle_gpus_are_named_for_cuda_visible_devices(monkeypatch, capsys):
    from kernelwright import gpus

    some = [gpus.Gpu(i, "H200", (9, 0), 141000, 4 if i else 9000, 0, 0) for i in range(4)]
    monkeypatch.setattr(gpus, "nvidia_smi", lambda: ("580", tuple(some), None))
    assert run(monkeypatch, "diffusion_env.py", "idle-gpus", "--count", "2") == 0
    assert capsys.readouterr().out == "1,2\n"


def test_a_pipeline_is_not_run_with_one_step(monkeypatch, capsys):
    """diffusers' scheduler divides by zero there."""
    assert run(monkeypatch, "ltx_kernel_injection_example.py", "--steps", "1") == 2
    assert "--steps is 1, expected 2 or more" in capsys.readouterr().err


def test_a_setting_that_cannot_be_used_is_one_line(monkeypatch):
    said = run(monkeypatch, "benchmark_rmsnorm.py", "--device", "cpu", "--shape", "2by3")
    assert said.startswith("benchmark_rmsnorm: ")
    assert "\n" not in said


def test_the_hub_package_is_built_checked_loaded_and_used(monkeypatch, capsys):
    pytest.importorskip("kernels")
    assert run(monkeypatch, "huggingface_kernels_example.py", "--device", "cpu") == 0
    said = capsys.readouterr().out
    assert "nothing the Hub would refuse" in said
    assert "rmsnorm is ours" in said
    assert "the logits are those of inject" in said
