"""Gated linear units in plain PyTorch, and the eager chains their exact modes equal."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..row.reference import widen


def halves(input: Tensor, gate: str) -> tuple[Tensor, Tensor]:
    """(the half to activate, the other)"""
    first, second = input.chunk(2, dim=-1)
    return (first, second) if gate == "first" else (second, first)


def geglu(input: Tensor, approximate: bool, gate: str) -> Tensor:
    return gelu_mul(*halves(input, gate), approximate)


def swiglu(input: Tensor, gate: str) -> Tensor:
    return silu_mul(*halves(input, gate))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(widen(gate)) * widen(up)).to(gate.dtype)


def gelu_mul(gate: Tensor, up: Tensor, approximate: bool) -> Tensor:
    form = "tanh" if approximate else "none"
    return (F.gelu(widen(gate), approximate=form) * widen(up)).to(gate.dtype)


def eager_geglu(input: Tensor, approximate: bool, gate: str) -> Tensor:
    active, other = halves(input, gate)
    return other * F.gelu(active, approximate="tanh" if approximate else "none")


def eager_swiglu(input: Tensor, gate: str) -> Tensor:
    return eager_silu_mul(*halves(input, gate))


def eager_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up
