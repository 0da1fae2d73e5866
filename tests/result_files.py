"""Rows of result files as the commands write them, and files of such rows."""

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from kernelwright.measure.results import SCHEMA

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "commit": "0123456789abcdef",
    "command": "python -m kernelwright bench model ltx-video",
}
BEFORE = {"GEMM": 40.0, "attention": 20.0, "fused": 0.0, "other": 30.0}
AFTER = {"GEMM": 39.0, "attention": 20.0, "fused": 6.0, "other": 5.0}
WORKLOAD = {"model": "ltx-video", "tiny": False, "sizes": {"batch": 2, "frames": 49}}
WORKLOAD |= {"dtype": "bfloat16"}


def model_row(config, ms=100.0, **more):
    row = WORKLOAD | {"config": config, "ms": ms, "equal": "fused" not in config}
    row |= {"error": 0.01, "first_s": 1.5, "peak_gib": 4.0} | more
    return row | ({} if config in ("eager", "compile") else {"replaced": 254})


MODELS = (model_row("eager"), model_row("exact", 80.0), model_row("compile", 90.0, equal=False))


def training_row(config, ms=200.0, **more):
    row = WORKLOAD | {"lora": 64, "checkpointing": False, "attention": "default", "config": config}
    same = 448 if config in ("eager", "exact") else 0
    row |= {"ms": ms, "first_s": 1.0, "reserved_gib": 9.0, "error": 0.01, "gradients": 448}
    row |= {"gradients_equal": same, "gradients_repeated": 448, "losses": 20}
    return row | {"losses_equal": 20 if same else 1, "losses_repeated": 20} | more


TRAINING = (training_row("eager"), training_row("exact", 125.0), training_row("compile", 96.0))


def op_row(**more):
    gpu = {"eager": 80.0, "triton": 15.0, "exact:torch": 17.0, "exact:wan": 16.0, "compile": 20.0}
    row = {"op": "rmsnorm", "case": "ltx 2x2688x2048", "dtype": "bfloat16", "chosen": "triton"}
    row |= {"megabytes": 45.0, "copy_us": 12.0, "gpu_us": gpu, "host_us": dict.fromkeys(gpu, 9.0)}
    return row | more


def exact_row(**more):
    row = {"op": "rmsnorm", "chain": "torch", "dtype": "bfloat16", "width": 64, "rows": 4}
    return row | {"elements": 1000, "mismatches": 0} | more


VIDEO_HEAD = {
    "device": "NVIDIA H200",
    "dtype": "bfloat16",
    "model": None,
    "tiny": False,
    "settings": {"frames": 49, "height": 512, "width": 768, "batch": 1, "steps": 30}
    | {"guidance_scale": 3.0, "seed": 42},
}


def video_row(config, total_s=3.0, **more):
    row = {"config": config, "equal": True, "psnr_db": None, "total_s": total_s, "text_s": 0.1}
    row |= {"denoise_s": total_s - 0.6, "decode_s": 0.5, "step_s": (total_s - 0.6) / 30}
    return row | {"frame_s": total_s / 49, "reserved_gib": 9.5, "ready_s": 1.0} | more


VIDEOS = (
    video_row("eager"),
    video_row("eager again", 3.03),
    video_row("exact+graphs", 2.0),
    video_row("compile", 2.4, equal=False, psnr_db=38.2),
)


def profile_row(config, categories, wall_ms, **more):
    kernels = [
        {"name": "nvjet_sm90", "category": "GEMM", "ours": False, "calls": 10, "ms": 27.0},
        {"name": "kernelwright_row", "category": "norm", "ours": True, "calls": 3, "ms": 4.0},
    ]
    row = WORKLOAD | {"level": 1, "device": "cuda:0", "config": config}
    row |= {"kernel_ms": sum(categories.values()), "launches": 13, "categories": categories}
    row |= {"kernels": kernels[: 1 if config == "eager" else 2], "wall_ms": wall_ms}
    return row | {"graph_breaks": None} | more


PROFILES = (
    profile_row("eager", {"GEMM": 27.0, "norm": 6.0, "modulation": 17.0}, 60.0),
    profile_row("exact", {"GEMM": 27.0, "norm": 4.0, "modulation": 0.0}, 45.0),
)


def counted_row(**more):
    row = WORKLOAD | {"level": 3, "device": "cuda:0", "config": "exact", "name": "kernelwright_row"}
    row |= {"grid": "(5376, 1, 1)", "block": "(256, 1, 1)", "launches": 28, "us": 36.3}
    row |= {"dram_gbs": 4224.0, "dram_percent": 88.0, "compute_percent": 31.0, "occupancy": 82.0}
    row |= {"theoretical_occupancy": 100.0, "registers": 40.0, "waves": 6.8, "block_limits": {}}
    return row | {"limiter": "registers", "advice": "at the speed of memory"} | more


def write_results(folder, kind, *rows, name=None, head=None, **environment):
    """A result file of this kind in `folder`."""
    path = folder / (name or f"{kind}.json")
    content = {"schema": SCHEMA, "kind": kind, "environment": ENVIRONMENT | environment}
    content |= VIDEO_HEAD if kind == "video" else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | (head or {}) | {"rows": list(rows)}))
    return path


MEASURED = Path(__file__).parents[1] / "results" / "h200"


def invoked(command):
    """Calls a command with these arguments, as from a shell."""
    app = typer.Typer()
    app.command()(command)

    def invoke(*args):
        return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "200"})

    return invoke
