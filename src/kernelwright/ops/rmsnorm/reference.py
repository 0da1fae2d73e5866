"""RMSNorm in plain PyTorch, and the eager chains its exact modes equal."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..row.reference import affine, eager_norm, normalize, widen


def rmsnorm(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return affine(normalize(widen(input), "rms", eps), weight).to(input.dtype)


def rmsnorm_residual(
    input: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = (widen(input) + widen(residual)).to(input.dtype)
    return rmsnorm(total, weight, eps), total


def _chain(chain: str, input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return eager_norm(input, chain, "rms", weight, None, eps)


def _residual_chain(
    chain: str, input: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = residual + input
    return eager_norm(total, chain, "rms", weight, None, eps), total


CHAINS = ("torch", "diffusers", "transformers")
RMSNORM_CHAINS = {c: partial(_chain, c) for c in CHAINS}
RMSNORM_RESIDUAL_CHAINS = {c: partial(_residual_chain, c) for c in CHAINS}
