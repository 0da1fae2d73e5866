"""PyTorch's own attention kernels, each called by name.

`F.scaled_dot_product_attention` picks a kernel by process-wide switches; each aten op under it is
one kernel. They trace under torch.compile, have gradients, and need no switch to be set and reset.
The preparation of arguments that the function does before them is repeated here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


def default(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
) -> Tensor:
    """F.scaled_dot_product_attention, whichever kernel PyTorch takes."""
    # not every kernel takes both, and PyTorch's CPU kernel gives NaN for causal with scale < 0
    if causal and (mask is not None or (scale is not None and scale <= 0)):
        mask, causal = with_causal(mask, query, key), False
    if 0 in (query.shape[0], query.shape[1]):  # on CUDA it returns None for no batch (torch 2.11)
        return math(query, key, value, mask, scale, causal)
    if mask is not None and mask.ndim == 1:
        mask = mask[None]
    return F.scaled_dot_product_attention(
        query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=_grouped(query, key)
    )


def math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
) -> Tensor:
    """The whole score matrix in memory; any shape, any device."""
    if causal and mask is not None:
        mask, causal = with_causal(mask, query, key), False
    # PyTorch divides by the number of key heads if groups are on: no heads would end the process
    grouped = _grouped(query, key)
    return aten._scaled_dot_product_attention_math.default(
        query, key, value, additive(mask, query), 0.0, causal, None, scale=scale, enable_gqa=grouped
    )[0]


def _grouped(query: Tensor, key: Tensor) -> bool:
    grouped = False
    if key.shape[1] != query.shape[1]:  # a plain bool, also when shapes are symbols
        grouped = True
    return grouped


def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
) -> Tensor:
    if causal and mask is not None:
        mask, causal = with_causal(mask, query, key), False
    return aten._scaled_dot_product_cudnn_attention.default(
        query,
        key,
        value,
        additive(mask, query),
        _needs_grad(query, key, value),
        0.0,
        causal,
        False,
        scale=scale,
    )[0]


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
) -> Tensor:
    width = query.shape[-1]
    if width % 8:
        scale = width**-0.5 if scale is None else scale
        query, key, value = (F.pad(t, (0, 8 - width % 8)) for t in (query, key, value))
    out = aten._scaled_dot_product_flash_attention.default(
        query, key, value, 0.0, causal, False, scale=scale
    )[0]
    return out[..., :width] if width % 8 else out


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
) -> Tensor:
    if causal and mask is not None:
        mask, causal = with_causal(mask, query, key), False
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    bias = additive(mask, query)
    needs_grad = _needs_grad(query, key, value) or (bias is not None and _needs_grad(bias))
    return aten._scaled_dot_product_efficient_attention.default(
        query,
        key,
        value,
        None if bias is None else _aligned_bias(bias, query, key),
        needs_grad,
        0.0,
        causal,
        scale=scale,
    )[0]


KERNELS = {
    "torch": default,
    "math": math,
    "cudnn": cudnn,
    "flash": flash,
    "efficient": efficient,
}
# those that take a mask as numbers to be added
ADDING = ("math", "cudnn", "efficient")


def with_causal(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """A mask that also hides keys after the query's own position, counted from the first."""
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


def additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask as a bias of four dimensions. PyTorch masks for cuDNN with a finite number (torch
    2.10), which makes a row that sees no key see all of them; -inf gives zeros."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, query.new_full((), float("-inf")))
    return mask[(None,) * (4 - mask.ndim)]


def _aligned_bias(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A bias [B, H, Sq, Sk] whose rows start on multiples of 16 elements; copied if they do not."""
    keys = key.shape[2]
    if bias.shape[3] != keys:
        bias = bias.expand(-1, -1, -1, keys)
    if keys % 16:
        bias = F.pad(bias, (0, 16 - keys % 16))[..., :keys]
    elif bias.stride(3) != 1 or any(bias.stride(i) % 16 for i in range(3) if bias.shape[i] > 1):
        bias = bias.contiguous()
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], keys)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
