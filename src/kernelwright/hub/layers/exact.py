"""Layers with the bits of eager PyTorch, for transformers' `use_kernels`.

The first call with a shape also runs the module's own forward and compares: a PyTorch that sums in
another order than the kernels keeps its own forward for that shape, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.gelu import gelu
from ...ops.rmsnorm import rmsnorm

# whether a kernel had eager's bits, by kind of call; a service with ever new shapes starts over
_equal: dict[Any, bool] = {}
MOST = 4096


class ExactRMSNorm(nn.Module):
    """LlamaRMSNorm and its twins: `weight`, `variance_epsilon`."""

    can_torch_compile = True
    has_backward = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, weight = hidden_states, self.weight
        # another dtype promotes the result, and at::mean sums strided rows in another order
        if weight.dtype != x.dtype or (x.shape[-1] > 1 and x.stride(-1) != 1):
            return type(self).forward(self, x)
        return compared(
            self, x, lambda: rmsnorm(x, weight, self.variance_epsilon, exact="transformers")
        )


class ExactGeLU(nn.Module):
    """transformers' GELUActivation: F.gelu, the erf form"""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        if not is_torch_gelu(self, tanh=False):
            return type(self).forward(self, input)
        return compared(self, input, lambda: gelu(input, approximate=False, exact="torch"))


class ExactGeluTanh(nn.Module):
    """transformers' GELUTanh: F.gelu, the tanh form"""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        if not is_torch_gelu(self, tanh=True):
            return type(self).forward(self, input)
        return compared(self, input, lambda: gelu(input, approximate=True, exact="torch"))


def is_torch_gelu(module: Any, tanh: bool) -> bool:
    """Whether a GELU of transformers calls F.gelu: it also has forms written in Python."""
    act = getattr(module, "act", None)
    if not tanh:
        return act is nn.functional.gelu
    if not isinstance(act, partial) or act.func is not nn.functional.gelu:
        return False
    return act.keywords == {"approximate": "tanh"}


def compared(module: Any, x: Tensor, kernel: Callable[[], Tensor]) -> Tensor:
    """The result of a kernel, or of the module's own forward where the two differed."""
    if torch.compiler.is_compiling():
        return kernel()
    key = type(module), x.shape, x.stride(), x.dtype, x.device
    equal = _equal.get(key)
    if equal is None:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return kernel()  # a comparison waits for the GPU, which a capture cannot
        own = type(module).forward(module, x)
        equal = torch.equal(own, kernel())
        if len(_equal) >= MOST:
            _equal.clear()
        _equal[key] = equal
        if not equal:
            name = type(module).__name__
            warnings.warn(
                f"{name} of shape {tuple(x.shape)} keeps its own forward: the kernel has other "
                f"bits on torch {torch.__version__}",
                stacklevel=2,
            )
        return own
    return kernel() if equal else type(module).forward(module, x)
