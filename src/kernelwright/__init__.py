"""kernelwright: fused GPU kernels for diffusers and transformers models. The same bits, faster."""

from __future__ import annotations

from . import ops
from .ops import *  # noqa: F403

__version__ = "0.1.0"
__all__ = ["__version__", *ops.__all__]
