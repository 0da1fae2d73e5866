"""kernelwright: fused GPU kernels for diffusers and transformers models. The same bits, faster."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

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


def __getattr__(name: str) -> Any:
    """Ops of other packages by name, `kernelwright.my_op`; their entry points are loaded first."""
    # `from kernelwright import models` asks here first: that must not load other packages
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is None:
        op = ops.registry().get(name)
        if op is not None:
            from .catalog import public

            return public(op)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
