"""Adapters that call kernels of the Hub as our ops, and say which calls each can take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.attention.limits import Request

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Adapter:
    """Calls a function of a Hub kernel as one of our ops.

    `function` is its name in the kernel, `call(function, *args)` calls it with the op's arguments,
    `problem(*args)` says why it cannot take them, or None.
    """

    op: str
    function: str
    call: Callable[..., Any]
    problem: Callable[..., str | None]


# kernels-community/activation: function(out, packed), which activates the first half


def _gated(function: Callable[..., Any], x: Tensor) -> Tensor:
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    function(out, x.contiguous())
    return out


def _gated_problem(x: Tensor, gate: str) -> str | None:
    if gate != "first":
        return "it activates the first half"
    if x.dtype not in HALF:
        return f"it takes float16 and bfloat16, not {x.dtype}"
    return "a tensor is empty" if x.numel() == 0 else None


def _tanh_problem(x: Tensor, approximate: bool, gate: str) -> str | None:
    return _gated_problem(x, gate) if approximate else "its GELU is the tanh form"


# flash attention: [batch, tokens, heads, dim]


def _attend(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    result = function(q, k, v, softmax_scale=scale, causal=causal)
    return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)


def _attention_problem(request: Request) -> str | None:
    if request.device.type != "cuda":
        return f"tensors are on {request.device.type}, it needs a CUDA GPU"
    if request.dtype not in HALF:
        return f"it takes float16 and bfloat16, not {request.dtype}"
    if request.mask != "none":
        return "it takes no mask"
    if request.head_dim != request.value_dim or request.head_dim % 8 or request.head_dim > 256:
        return "it needs one head_dim, a multiple of 8 up to 256"
    if request.causal and request.queries != request.keys:
        return "it aligns the causal mask to the last key, PyTorch to the first"
    return None if request.aligned else "it needs rows that start on multiples of 16 bytes"


FLASH = (Adapter("attention", "flash_attn_func", _attend, _attention_problem),)
ADAPTERS: dict[str, tuple[Adapter, ...]] = {
    "kernels-community/activation": (
        Adapter("swiglu", "silu_and_mul", lambda f, x, gate: _gated(f, x), _gated_problem),
        Adapter("geglu", "gelu_tanh_and_mul", lambda f, x, form, gate: _gated(f, x), _tanh_problem),
    ),
    "kernels-community/flash-attn2": FLASH,
    "kernels-community/flash-attn3": FLASH,
}
