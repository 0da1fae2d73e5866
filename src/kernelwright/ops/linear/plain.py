"""PyTorch's own GEMMs: F.linear, of one layer or several, and the one with GELU in its epilogue."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.torch_internals import addmm_activation


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    """F.linear, or PyTorch's GEMM with GELU in the epilogue."""
    if not gelu:
        return F.linear(x, weight, bias)
    assert bias is not None
    rows = x.reshape(-1, x.shape[-1])
    out = addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], weight.shape[0])


def plain_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    """The same kernels, writing into `out`."""
    rows, to = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        return torch.mm(rows, weight.t(), out=to)
    if gelu:
        return addmm_activation(bias, rows, weight.t(), use_gelu=True, out=to)
    return torch.addmm(bias, rows, weight.t(), out=to)


def separate_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> list[Tensor]:
    """One GEMM for each layer."""
    if not biases:
        return [F.linear(x, w) for w in weights]
    return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
