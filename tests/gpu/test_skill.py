"""The scripts of the skill on a GPU, as an agent runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from as_the_skill_says import NAMES, make
from plugged import environment, paths

from kernelwright import skill

SOURCES = Path(__file__).parents[2] / "src"


def run(folder, name, *options):
    done = subprocess.run(
        [sys.executable, str(skill.FOLDER / "scripts" / name), *options],
        env=environment(SOURCES),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("language", NAMES)
def test_an_op_made_as_the_pages_tell_is_good(language, tmp_path):
    created = make(language, tmp_path / "op")
    done = subprocess.run(
        [sys.executable, "-m", "kernelwright", "check", created.name, "--json"],
        env=environment(SOURCES, *paths(created)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert json.loads(done.stdout)["verdict"] == "good"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [30.0, 7.3, 0.1, 3.0])
def test_pytorch_divides_by_a_number_as_the_page_of_cuda_says(dtype, number):
    """By its reciprocal, taken in float32; what an exact kernel has to repeat."""
    x = torch.randn(1 << 16, device="cuda").to(dtype)
    inverse = torch.tensor(1.0, device="cuda") / torch.tensor(number, device="cuda")
    assert torch.equal(x / number, (x.float() * inverse).to(dtype))


@pytest.mark.parametrize("numerics", ["exact", "fused"])
def test_a_pipeline_is_injected_and_restored(tmp_path, numerics):
    options = ("--device", "cuda", "--numerics", numerics, "--graphs")
    said = run(tmp_path, "ltx_kernel_injection_example.py", *options)
    assert said.endswith("the bits of eager again\n")
    if numerics == "exact":
        assert "\nthe bits of eager\n" in said


@pytest.mark.parametrize("preset", ["llama-3-8b", "qwen3-8b", "falcon-7b"])
def test_a_language_model_keeps_its_bits(tmp_path, preset):
    options = ("--device", "cuda", "--preset", preset)
    said = run(tmp_path, "transformers_injection_example.py", *options)
    assert said.endswith("the bits of eager\nthe bits of eager again\n")


def test_rmsnorm_is_timed_at_the_shapes_of_models(tmp_path):
    said = run(tmp_path, "benchmark_rmsnorm.py", "--device", "cuda", "--seconds", "0.02")
    assert "GPU µs" in said
    assert "4x4096x3072" in said
    assert "no GPU" not in said


def test_a_denoise_step_is_timed_and_keeps_its_bits(tmp_path):
    options = ("--device", "cuda", "--tiny", "--model", "ltx-video", "--label", "tiny")
    configs = ("--config", "eager,exact,exact+graphs", "--seconds", "0.2")
    run(tmp_path, "bench_denoise.py", *options, *configs)
    rows = json.loads((tmp_path / "outputs/benchmarks/tiny.json").read_text())["rows"]
    equal = {row["config"]: row["equal"] for row in rows}
    assert equal["exact"]
    assert equal["exact+graphs"]
    assert all(row["ms"] > 0 for row in rows)


def test_a_video_is_timed_from_prompt_to_frames(tmp_path):
    options = ("--device", "cuda", "--tiny", "--config", "exact+graphs", "--out", "video.json")
    run(tmp_path, "benchmark_example.py", *options)
    rows = json.loads((tmp_path / "video.json").read_text())["rows"]
    assert {"eager", "exact+graphs"} <= {row["config"] for row in rows}
    assert not any("failed" in row for row in rows)


def test_the_hub_package_runs(tmp_path):
    pytest.importorskip("kernels")
    said = run(tmp_path, "huggingface_kernels_example.py", "--device", "cuda")
    assert "built torch-cuda" in said
    assert "the logits are those of inject" in said


def test_the_preflight_sees_the_gpu(tmp_path):
    said = run(tmp_path, "diffusion_env.py")
    assert "GPUs none" not in said
    assert said.endswith("usable\n")
