"""The switches of PyTorch that decide which kernels run, as one value to compare."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ... import library_internals
from ...backends import torch_internals
from ...ops.selection import surrounding

# functions of torch.nn.functional that people patch, for all models of a process
FUNCTIONS = ("scaled_dot_product_attention", "linear", "gelu", "silu", "layer_norm", "rms_norm")
_functional = vars(F)
ORIGINAL = tuple(map(_functional.get, FUNCTIONS))


def switches(device_type: str) -> tuple[Any, ...]:
    """Everything besides its operands that decides which kernel runs."""
    if device_type == "cuda":
        torch_internals.find_attention_order()
    replaced = tuple(map(_functional.get, FUNCTIONS))
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        torch.get_default_dtype(),
        torch_internals.function_modes() and torch.get_default_device(),
        torch_internals.attention_switches(),
        torch_internals.gemm_switches(),
        torch_internals.float32_switches(),
        torch_internals.convolution_switches(),
        surrounding(),
        library_internals.active_attention_backend(),
        None if replaced == ORIGINAL else replaced,
    )


def torch_attends() -> bool:
    """Whether F.scaled_dot_product_attention is PyTorch's own."""
    return F.scaled_dot_product_attention is ORIGINAL[0]
