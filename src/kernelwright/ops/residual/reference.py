"""Gated residuals in plain PyTorch, and the eager chains their exact modes equal."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..row.reference import affine, eager_norm, modulated, normalize, spread, widen

Part = Tensor | None


def gated_residual(residual: Tensor, x: Tensor, gate: Part) -> Tensor:
    branch = widen(x) if gate is None else widen(x) * spread(gate, x)
    return (widen(residual) + branch).to(residual.dtype)


def gated_residual_norm(
    residual: Tensor,
    x: Tensor,
    gate: Part,
    weight: Part,
    bias: Part,
    scale: Part,
    shift: Part,
    kind: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    total = gated_residual(residual, x, gate)
    y = affine(normalize(widen(total), kind, eps), weight, bias)
    return modulated(y, scale, shift).to(total.dtype), total


def _gated_residual(chain: str, residual: Tensor, x: Tensor, gate: Part) -> Tensor:
    branch = x if gate is None else x * spread(gate, x)
    return ((residual.float() if chain == "wan" else residual) + branch).type_as(residual)


def _gated_residual_norm(
    chain: str,
    residual: Tensor,
    x: Tensor,
    gate: Part,
    weight: Part,
    bias: Part,
    scale: Part,
    shift: Part,
    kind: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    total = _gated_residual(chain, residual, x, gate)
    y = eager_norm(total, chain, kind, weight, bias, eps)
    return modulated(y, scale, shift).type_as(total), total


GATED_RESIDUAL_CHAINS = {c: partial(_gated_residual, c) for c in ("diffusers", "wan")}
GATED_RESIDUAL_NORM_CHAINS = {
    c: partial(_gated_residual_norm, c) for c in ("diffusers", "transformers", "torch", "wan")
}
