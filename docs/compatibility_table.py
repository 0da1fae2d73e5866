"""What injection works with: a table for the docs, read from the marks of the tests.

A test that shows a feature to work carries `@pytest.mark.compatibility("LoRA")`; `bits=False` says
that it compares within rounding, `needs=` names a package that is no part of the development
environment. The tests are parsed, not imported. A feature below that no test names is "not tested".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_TESTED = "not tested"

# what users ask for, by subject, and what to know about it
FEATURES: dict[str, dict[str, str]] = {
    "Adapters and guidance": {
        "LoRA": "loaded before or after, several, scaled, fused or not",
        "LoRA hot-swapping": "with `graphs=True` the graph stays",
        "ControlNet": "FLUX, SD3 and SDXL",
        "IP-Adapter": "FLUX and SD3; blocks with its processor run without QK-norm fusion",
        "PAG": "its processors are called as they are",
        "GLIGEN": "",
        "skip-layer guidance": "",
        "custom attention processors": "called as they are, once per forward",
    },
    "Memory": {
        "model CPU offload": "`enable_model_cpu_offload`, in either order; no CUDA graphs",
        "sequential CPU offload": "`enable_sequential_cpu_offload`, in either order",
        "group offload": "in either order",
    },
    "Caches between steps": {
        "First Block Cache": "the bits are those of the cache without injection",
        "Pyramid Attention Broadcast": "as above",
        "FasterCache": "as above",
        "TaylorSeer": "as above",
        "MagCache": "as above",
        "cache-dit": "as above",
    },
    "Quantised weights": {
        "bitsandbytes 4-bit": "its layers run as they are; norms, RoPE and gates are fused",
        "bitsandbytes 8-bit": "as above",
        "torchao": "as above; weight-only int8",
        "quanto": "as above; int8 weights",
        "GGUF": "as above; `GGUFLinear` of diffusers",
    },
    "Compilers": {
        "torch.compile of the whole model": "Inductor rounds where it chooses",
        "torch.compile by block": "`compile_repeated_blocks`; on an H200 DiT, PixArt and Falcon "
        "lost bits, six other presets kept them",
        "the torch.compile backend of kernelwright": "",
    },
    "Several processes": {
        "Ulysses context parallelism": "",
        "ring context parallelism": "",
        "FSDP2": "",
        "DDP": "",
        "tensor parallelism": "",
    },
    "Training": {
        "training of all weights": "loss and gradients, where eager repeats itself",
        "training of LoRA": "",
        "training of DoRA": "",
        "training with graphs": "`graphs=True`: forward and backward of each block are replayed",
        "gradient checkpointing": "reentrant: without graphs",
        "autocast": "blocks that train run as without injection",
    },
    "Language models": {
        "generate with a dynamic cache": "no CUDA graphs; layers run as generated kernels",
        "generate with a static cache": "replayed with `graphs=True`",
    },
    "Everything else": {
        "whole pipelines": "`kw.inject(pipe)`",
        "set_attention_backend": "",
        "forward hooks": "run as often as without injection",
        "deepcopy": "",
        "save_pretrained": "",
        "torch.inference_mode": "",
        "threads": "",
    },
}


@dataclass(frozen=True)
class Shown:
    """One mark: this test shows that this feature works."""

    feature: str
    bits: bool
    needs: str | None
    gpu: bool
    test: str


def shown() -> list[Shown]:
    """Every mark of every test."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    return [mark for path in tests for mark in _marks(path)]


def _marks(path: Path) -> Iterator[Shown]:
    text = path.read_text(encoding="utf-8")
    if ".compatibility(" not in text:
        return
    gpu = "gpu" in path.relative_to(ROOT).parts
    for function in ast.parse(text).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in (n for d in function.decorator_list for n in ast.walk(d)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.compatibility":
                how = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
                test = f"{path.relative_to(ROOT)}::{function.name}"
                for feature in map(ast.literal_eval, call.args):
                    yield Shown(feature, how.get("bits", True), how.get("needs"), gpu, test)


def compatibility(results: Path) -> str:
    """One table a subject, one line a feature."""
    found: dict[str, list[Shown]] = {}
    for mark in shown():
        found.setdefault(mark.feature, []).append(mark)
    pieces = []
    for subject, features in FEATURES.items():
        pieces += [
            f"### {subject}",
            "",
            "| | works | tested on | to know |",
            "|---|---|---|---|",
        ]
        for feature, remark in features.items():
            pieces.append(_line(feature, remark, found.get(feature, [])))
        pieces.append("")
    return "\n".join(pieces).rstrip()


def in_short(results: Path) -> str:
    """One line a subject, for README.md."""
    found = {mark.feature for mark in shown()}
    loose = {mark.feature for mark in shown() if not mark.bits}
    lines = ["| | works, bit-identical | otherwise |", "|---|---|---|"]
    for subject, features in FEATURES.items():
        same = ", ".join(f for f in features if f in found - loose)
        rest = [f"{f}: within rounding" for f in features if f in loose]
        rest += [f"{f}: {NOT_TESTED}" for f in features if f not in found]
        lines.append(f"| {subject} | {same or '–'} | {', '.join(rest)} |")
    return "\n".join(lines)


def _line(feature: str, remark: str, marks: list[Shown]) -> str:
    if not marks:
        return f"| {feature} | {NOT_TESTED} | – | {remark} |"
    return f"| {feature} | {_output(marks)} | {_where(marks)} | {remark} |"


def _output(marks: list[Shown]) -> str:
    """Bit-identical to the same model without injection, or where it is so."""
    loose = {mark.gpu for mark in marks if not mark.bits}
    strict = {mark.gpu for mark in marks if mark.bits}
    if not loose:
        return "bit-identical"
    if not strict - loose:
        return "within rounding"
    return f"bit-identical on the {'GPU' if True in strict else 'CPU'}, else within rounding"


def _where(marks: list[Shown]) -> str:
    """CPU, GPU or both; where none of the tests runs without another package, its name."""
    places = [
        name for gpu, name in ((False, "CPU"), (True, "GPU")) if any(m.gpu == gpu for m in marks)
    ]
    needs = {mark.needs for mark in marks}
    extra = "" if None in needs else f", if {' or '.join(sorted(filter(None, needs)))} is installed"
    return ", ".join(places) + extra
