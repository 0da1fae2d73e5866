"""The state of the process that decides which kernels run."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from ...ops.selection import surrounding

# functions that people replace in torch.nn.functional, for all models of a process
FUNCTIONS = ("scaled_dot_product_attention", "linear", "gelu", "silu", "layer_norm", "rms_norm")
_functional = vars(F)
ORIGINAL = tuple(map(_functional.get, FUNCTIONS))


def switches(device_type: str) -> tuple[Any, ...]:
    """What decides a kernel beside its operands, most of it as torch.backends asks for it: through
    properties of torch.backends this takes four times as long."""
    state: Any = torch._C
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    replaced = tuple(map(_functional.get, FUNCTIONS))
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        torch.get_default_dtype(),
        state._len_torch_function_stack() and torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        state._get_flash_sdp_enabled(),
        state._get_mem_efficient_sdp_enabled(),
        state._get_math_sdp_enabled(),
        state._get_cudnn_sdp_enabled(),
        tuple(state._get_sdp_priority_order()),
        state._get_math_sdp_allow_fp16_bf16_reduction(),
        state._get_fp32_precision_getter("cuda", "matmul"),
        state._get_cublas_allow_fp16_accumulation(),
        state._get_cublas_allow_fp16_reduced_precision_reduction(),
        state._get_cublas_allow_bf16_reduced_precision_reduction(),
        state._get_blas_preferred_backend().value,  # the enumeration itself is slow to hash
        state._get_fp32_precision_getter("cuda", "conv"),
        state._get_cudnn_enabled(),
        state._get_cudnn_benchmark(),
        state._get_cudnn_deterministic(),
        surrounding(),
        dispatch and dispatch._AttentionBackendRegistry._active_backend,
        None if replaced == ORIGINAL else replaced,
    )


def torch_attends() -> bool:
    """Whether F.scaled_dot_product_attention is PyTorch's own."""
    return F.scaled_dot_product_attention is ORIGINAL[0]
