"""Adaptive norms in plain PyTorch, and the eager chains their exact modes equal."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..row.reference import affine, eager_norm, modulated, normalize, spread, widen

Part = Tensor | None


def modulate(x: Tensor, scale: Part, shift: Part) -> Tensor:
    return modulated(widen(x), scale, shift).to(x.dtype)


def adaln_rmsnorm(input: Tensor, weight: Part, scale: Part, shift: Part, eps: float) -> Tensor:
    y = affine(normalize(widen(input), "rms", eps), weight)
    return modulated(y, scale, shift).to(input.dtype)


def adaln_layernorm(
    input: Tensor, weight: Part, scale: Part, shift: Part, bias: Part, eps: float
) -> Tensor:
    y = affine(normalize(widen(input), "layer", eps), weight, bias)
    return modulated(y, scale, shift).to(input.dtype)


def adaln_zero(
    input: Tensor, weight: Part, scale: Part, shift: Part, gate: Part, eps: float
) -> Tensor:
    y = modulated(affine(normalize(widen(input), "rms", eps), weight), scale, shift)
    return (y if gate is None else y * spread(gate, y)).to(input.dtype)


def _modulate(chain: str, x: Tensor, scale: Part, shift: Part) -> Tensor:
    return modulated(x.float() if chain == "wan" else x, scale, shift).type_as(x)


def _rms(chain: str, input: Tensor, weight: Part, scale: Part, shift: Part, eps: float) -> Tensor:
    return modulated(eager_norm(input, chain, "rms", weight, None, eps), scale, shift)


def _layer(
    chain: str, input: Tensor, weight: Part, scale: Part, shift: Part, bias: Part, eps: float
) -> Tensor:
    y = eager_norm(input, "torch" if chain == "diffusers" else chain, "layer", weight, bias, eps)
    return modulated(y, scale, shift).type_as(input)


def _zero(
    chain: str, input: Tensor, weight: Part, scale: Part, shift: Part, gate: Part, eps: float
) -> Tensor:
    y = _rms(chain, input, weight, scale, shift, eps)
    return y if gate is None else y * spread(gate, y)


MODULATE_CHAINS = {c: partial(_modulate, c) for c in ("diffusers", "wan")}
ADALN_RMSNORM_CHAINS = {c: partial(_rms, c) for c in ("diffusers", "torch")}
ADALN_LAYERNORM_CHAINS = {c: partial(_layer, c) for c in ("diffusers", "wan")}
ADALN_ZERO_CHAINS = {c: partial(_zero, c) for c in ("diffusers", "torch")}
