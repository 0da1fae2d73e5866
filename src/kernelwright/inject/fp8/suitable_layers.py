"""Which layers run in fp8, and which of their calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...ops import fp8
from ..runtime import model_run
from ..runtime.forwards import hooked
from ..runtime.sites import mode
from ..state.hooks import is_plain

# a layer with fewer rows makes a modulation or an embedding: sensitive, and cheap in 16 bits
ROWS = 64
NARROWEST = 64


def unfit(name: str, layer: nn.Linear) -> str | None:
    """Why a layer of a model is not to be quantised, or None if it is."""
    if not any(part.isdigit() for part in name.split(".")):
        return "outside the blocks: first and last layers are sensitive"
    return misfit_of_shape(layer.weight)


def misfit_of_shape(weight: Tensor) -> str | None:
    """Why no fp8 GEMM takes a weight, or None if one does."""
    n, k = weight.shape
    if n % fp8.MULTIPLE or k % fp8.MULTIPLE or min(n, k) < NARROWEST:
        return f"its weight is {n} × {k}, which fp8 GEMMs do not take"
    return None


def check_device(model: nn.Module) -> None:
    """Raise an error if the GPU of a model has no fp8 GEMM."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda" and (no := fp8.unsupported(device.index or 0)):
        raise ValueError(f'inject: numerics is "fp8", but {no}; "fused" needs less')


def is_short(x: Tensor) -> bool:
    return x.numel() < ROWS * x.shape[-1]


def misfit(layer: Any, x: Tensor, seen: bool = False) -> str | None:
    """Why this call of a layer must run in 16 bits, or None; `seen`: it has run in fp8."""
    weight, bias = layer._parameters.get("weight"), layer.bias
    if type(weight) is not nn.Parameter or type(x) is not Tensor or weight.is_inference():
        return "tensors of a class of their own"
    if bias is not None and bias.is_inference():
        return "tensors of a class of their own"
    if hooked(layer):
        return "a hook wants to see it being called"
    if not is_plain(layer, nn.Linear):
        return "its class has another forward now"
    if id(layer) in model_run.active.adapted or id(layer) in mode.adapted:
        return "an adapter is around it"
    if not model_run.active.token and not mode.inside:
        return "it was called outside its model"
    if not seen and is_short(x):
        return f"fewer than {ROWS} rows"
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    ):
        return "gradients are recorded"
    if x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
        return "its dtype changes"
    if not x.is_cuda:
        return None  # emulated in PyTorch
    return fp8.problem(x.device, x.dtype, weight.shape, bias)
