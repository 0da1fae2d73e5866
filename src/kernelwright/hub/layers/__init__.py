"""Layers of the Hub kernel `ltx-kernels`, for `kernels.kernelize`.

A layer has no state and no constructor: `kernelize` puts its `forward` on a module of the model,
whose weights it reads. Layers compute in float32 and round once, but for those named Exact, which
have the bits of eager PyTorch. Where a kernel would skip
something (an adapter, a hook, another class, mixed dtypes), the module's own code runs.
"""

from .adaptive import (
    AdaLayerNorm,
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    AdaLayerNormZeroSingle,
    SD35AdaLayerNormZeroX,
)
from .exact import ExactGeLU, ExactGeluTanh, ExactRMSNorm
from .flux import FluxAttention, FluxSingleTransformerBlock, FluxTransformerBlock
from .fused_mlp import RMSNormSwiGLUMLP
from .gated import (
    GEGLU,
    GEGLUMLP,
    GeLU,
    GeluAndMul,
    GeluTanh,
    GeluTanhAndMul,
    GemmaMLP,
    SiluAndMul,
    SwiGLU,
    SwiGLUMLP,
)
from .ltx import LTXAttention, LTXVideoTransformerBlock
from .norms import DiffusersRMSNorm, LayerNorm, RMSNorm, TorchRMSNorm
from .rotary import RotaryPosEmb

__all__ = [
    "GEGLU",
    "GEGLUMLP",
    "AdaLayerNorm",
    "AdaLayerNormContinuous",
    "AdaLayerNormZero",
    "AdaLayerNormZeroSingle",
    "DiffusersRMSNorm",
    "ExactGeLU",
    "ExactGeluTanh",
    "ExactRMSNorm",
    "FluxAttention",
    "FluxSingleTransformerBlock",
    "FluxTransformerBlock",
    "GeLU",
    "GeluAndMul",
    "GeluTanh",
    "GeluTanhAndMul",
    "GemmaMLP",
    "LTXAttention",
    "LTXVideoTransformerBlock",
    "LayerNorm",
    "RMSNorm",
    "RMSNormSwiGLUMLP",
    "RotaryPosEmb",
    "SD35AdaLayerNormZeroX",
    "SiluAndMul",
    "SwiGLU",
    "SwiGLUMLP",
    "TorchRMSNorm",
]
