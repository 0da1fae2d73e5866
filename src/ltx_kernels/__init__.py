"""The import name of the LTX-Video kernels example: its functions, from kernelwright.

>>> from ltx_kernels import inject_optimized_kernels, rmsnorm, rope_3d
"""

from kernelwright.ops.adaln import adaln_layernorm, adaln_rmsnorm, adaln_zero
from kernelwright.ops.glu import geglu, swiglu
from kernelwright.ops.rmsnorm import rmsnorm, rmsnorm_residual
from kernelwright.ops.rope import rope_1d, rope_3d, rope_3d_extended

from .injection import (
    OptimizedLTXVideoAttnProcessor,
    inject_optimized_kernels,
    patch_rmsnorm_modules,
)

__all__ = [
    "OptimizedLTXVideoAttnProcessor",
    "adaln_layernorm",
    "adaln_rmsnorm",
    "adaln_zero",
    "geglu",
    "inject_optimized_kernels",
    "patch_rmsnorm_modules",
    "rmsnorm",
    "rmsnorm_residual",
    "rope_1d",
    "rope_3d",
    "rope_3d_extended",
    "swiglu",
]
