"""The configurations of a model: eager, injected, compiled, with CUDA graphs, and combinations.

"strict", "strict_pointwise" and "strict_reduction" are the numerics of torch.compile that are to be
closer to eager's, from torch 2.15 on. "fa4" is the extra `attention`. A configuration without "fa4"
in its name runs as if the extra were not installed, so that a name means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..backends.torch_internals import forget_compiled, has_compile_option
from ..errors import CannotRun
from ..inject import injected
from ..inject.report.report import Report
from ..library_internals import repeated_blocks
from ..ops.attention import without_fa4
from ..ops.attention.limits import fa4_installed

CONFIGS = (
    "eager",
    "exact",
    "exact+graphs",
    "fused",
    "fused+graphs",
    "compile",
    "compile+strict",
    "compile+strict_pointwise",
    "compile+strict_reduction",
    "exact+compile",
    "fused+compile",
    "exact+graphs+compile",
    "fused+graphs+compile",
    "fp8",
    "fp8+graphs",
    "fused+fa4+graphs",
    "fp8+fa4+graphs",
)


STRICT = ("strict", "strict_pointwise", "strict_reduction")


def configured(
    model: nn.Module, config: str, stack: ExitStack
) -> tuple[Callable[..., Any], Report | None]:
    """The callable for `model` in this configuration, until `stack` closes, and inject's report."""
    parts = config.split("+")
    report = None
    if "fa4" not in parts:
        stack.enter_context(without_fa4())
    elif not fa4_installed():
        raise CannotRun("flash-attn-4 is not installed: pip install 'kernelwright[attention]'")
    if tier := tier_of(config):
        how = injected(model, numerics=tier, graphs="graphs" in parts)
        report = stack.enter_context(how)
    if "compile" not in parts:
        return model, report
    strict = next((p for p in parts if p in STRICT), None)
    return _compiled(model, stack, strict), report


def tier_of(config: str) -> str | None:
    """The `numerics` for `inject`, or None for a configuration without injection."""
    plain = ("eager", "compile", "graphs", "fa4", "cache", *STRICT)
    return next((p for p in config.split("+") if p not in plain), None)


def _compiled(model: Any, stack: ExitStack, strict: str | None = None) -> Callable[..., Any]:
    """Compile block by block where the library names the blocks, as diffusers recommends."""
    if strict is not None and not has_compile_option("numerics"):
        raise CannotRun(f"torch.compile of torch {torch.__version__} has no numerics {strict!r}")
    how: dict[str, Any] = {} if strict is None else {"options": {"numerics": strict}}
    torch.compiler.reset()
    repeated = repeated_blocks(model)
    blocks = [m for m in model.modules() if type(m).__name__ in repeated]
    if not blocks:
        return torch.compile(model, **how)
    for block in blocks:
        block.compile(**how)

    def undo() -> None:
        for block in blocks:
            forget_compiled(block)

    stack.callback(undo)
    return model
