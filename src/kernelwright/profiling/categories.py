"""What a kernel does, by its name: GPU kernels, and PyTorch's ops on the CPU. Ours are known from
the ops' declarations, those of others by patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .our_kernels import is_ours, launched_by

CATEGORIES = (
    "GEMM",
    "attention",
    "norm",
    "modulation",
    "RoPE",
    "activation",
    "copies",
    "other",
)
NOTE = (
    "GEMM includes convolutions. A fused kernel counts once: norm with modulation and residual as "
    "norm, norm with RoPE as RoPE. PyTorch's additions and multiplications count as modulation: "
    "names do not tell apart those of residuals, eager norms and eager RoPE."
)

_INDUCTOR = re.compile(r"^(triton|cpp)_(poi|red|per|for|fused)")
_INDUCTOR_TEMPLATE = re.compile(r"^triton_(tem|mm|bmm)")

# the first match counts: a GEMM with GELU in its epilogue is a GEMM
_NAMES = (
    ("attention", r"sdpa|scaled_dot_product|flash|fmha|attention|softmax"),
    ("copies", r"nchwToNhwc|nhwcToNchw"),
    ("GEMM", r"nvjet|gem[mv]|cutlass|cublas|splitk|conv(?!ert)|xmma"),
    ("GEMM", r"^(aten|kernelwright)::_?(addmm|mm|bmm|baddbmm|matmul|linear)"),
    ("RoPE", r"rope|rotary"),
    ("norm", r"norm(?!al)|Moments|Welford|rsqrt|MeanOps|pow_tensor|^aten::(mean|sum|pow|var)"),
    ("RoPE", r"c10::complex|(cos|sin)_kernel|^aten::(cos|sin|view_as_complex)$"),
    ("activation", r"gelu|silu|glu|sigmoid|tanh|relu"),
    ("copies", r"copy|quantize|CatArray|mem(cpy|set)|Fill"),
    ("copies", r"transpose_kernel|index_?select|gather"),
    ("copies", r"^aten::(cat|stack|clone|contiguous|to|repeat|repeat_interleave|fill_|zero_)$"),
    ("modulation", r"Functor(OnSelf)?_add|(Mul|Div|Add|Sub)Functor|addcmul|neg_kernel"),
    ("modulation", r"^aten::(add|sub|rsub|mul|div|neg|addcmul)_?$"),
)
# Inductor puts every op that it fused into the name: the most telling one counts
_PARTS = (
    ("attention", r"softmax"),
    ("norm", r"norm|rsqrt|var_mean|mean"),
    ("RoPE", r"(^|_)(cos|sin)(_|$)|complex|rotary"),
    ("activation", r"gelu|silu|sigmoid|tanh|erf|relu"),
    ("modulation", r"(^|_)(add|mul|sub|rsub|div|neg)(_|$)"),
    ("copies", r"copy|clone|cat|stack|view|permute|transpose|expand|slice"),
)
_BY_NAME = [(found, re.compile(pattern, re.IGNORECASE)) for found, pattern in _NAMES]
_BY_PART = [(found, re.compile(pattern)) for found, pattern in _PARTS]


@dataclass(frozen=True)
class KernelTime:
    """All launches of one kernel in one forward."""

    name: str
    calls: int
    ms: float


def category(name: str) -> str:
    """One of CATEGORIES for the name of a kernel, or of an op such as `aten::addmm`. A kernel that
    several of our ops share counts under the first of their categories."""
    ops = launched_by(name)
    found = [op.category or _by_name(f"kernelwright::{op.name}") for op in ops]
    return min(found, key=CATEGORIES.index) if found else _by_name(name)


def _by_name(name: str) -> str:
    if _INDUCTOR_TEMPLATE.match(name):
        return "attention" if "attention" in name else "GEMM"
    rules = _BY_PART if _INDUCTOR.match(name) else _BY_NAME
    return next((found for found, pattern in rules if pattern.search(name)), "other")


def by_category(kernels: Iterable[KernelTime]) -> dict[str, float]:
    """Milliseconds of each category."""
    total = dict.fromkeys(CATEGORIES, 0.0)
    for kernel in kernels:
        total[category(kernel.name)] += kernel.ms
    return total


def split(kernels: Iterable[KernelTime]) -> dict[str, float]:
    """Milliseconds in GEMMs, in attention, in fused kernels (ours, Inductor's) and in the rest."""
    total = {"GEMM": 0.0, "attention": 0.0, "fused": 0.0, "other": 0.0}
    for kernel in kernels:
        total[_part(kernel.name)] += kernel.ms
    return total


def largest_others(kernels: Iterable[KernelTime], most: int = 6) -> dict[str, float]:
    """Milliseconds of the kernels that `split` counts under "other", the slowest first."""
    found = [k for k in kernels if _part(k.name) == "other"]
    return {k.name: k.ms for k in sorted(found, key=lambda k: -k.ms)[:most]}


def _part(name: str) -> str:
    kind = category(name)
    if kind in ("GEMM", "attention"):
        return kind
    return "fused" if is_ours(name) or _INDUCTOR.match(name) else "other"
