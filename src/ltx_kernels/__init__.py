"""The import name of the LTX-Video kernels example: its ten functions, from kernelwright.

>>> from ltx_kernels import rmsnorm, rope_3d
"""

from kernelwright.ops.adaln import adaln_layernorm, adaln_rmsnorm, adaln_zero
from kernelwright.ops.glu import geglu, swiglu
from kernelwright.ops.rmsnorm import rmsnorm, rmsnorm_residual
from kernelwright.ops.rope import rope_1d, rope_3d, rope_3d_extended

__all__ = [
    "adaln_layernorm",
    "adaln_rmsnorm",
    "adaln_zero",
    "geglu",
    "rmsnorm",
    "rmsnorm_residual",
    "rope_1d",
    "rope_3d",
    "rope_3d_extended",
    "swiglu",
]
