"""kernelwright: fused GPU kernels for diffusers and transformers models. The same bits, faster."""

from __future__ import annotations

from . import hub, ops
from .inject import Report, inject, injected, inspect, restore
from .ops import *  # noqa: F403

__version__ = "0.1.0"
__all__ = [
    "Report",
    "__version__",
    "hub",
    "inject",
    "injected",
    "inspect",
    "restore",
    *ops.__all__,
]
