"""LayerNorm in plain PyTorch, and the eager chains its exact modes equal."""

from __future__ import annotations

from torch import Tensor

from ..row.reference import affine, eager_norm, normalize, widen


def layernorm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return affine(normalize(widen(input), "layer", eps), weight, bias).to(input.dtype)


def _torch(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return eager_norm(input, "torch", "layer", weight, bias, eps)


def _wan(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return eager_norm(input, "wan", "layer", weight, bias, eps).type_as(input)


CHAINS = {"torch": _torch, "wan": _wan}
