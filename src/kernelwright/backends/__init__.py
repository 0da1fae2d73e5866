"""How a kernel reaches the GPU. A planner describes a `Launch`; `load` makes it callable."""

from __future__ import annotations

import torch

from .launch import HOPPER, Launch, Target, Unsupported, installed, load

__all__ = ["HOPPER", "Launch", "Target", "Unsupported", "installed", "load", "problem"]


def problem(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot run here, or None if it can."""
    if backend == "triton":
        from . import triton as chosen
    elif backend == "aot":
        from . import aot as chosen  # type: ignore[no-redef]
    else:
        from . import cuda as chosen  # type: ignore[no-redef]
    return chosen.problem(device, dtype)
