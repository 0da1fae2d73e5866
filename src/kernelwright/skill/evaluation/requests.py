"""The requests: what the agent is asked for, the right result, and the eager code it replaces."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import BadSetting

# what a tensor argument is: a row operand [..., D], or a vector [D] that may be None
ROWS, VECTOR, OPTIONAL = "rows", "vector", "vector or None"


@dataclass(frozen=True)
class Request:
    """`asks` is what the agent reads. `tensors` says what each tensor argument is, `numbers` has
    the values to try, the default first. `truth` computes in the dtype it is given; `eager` is the
    bar. `limits` are numbers that must be refused. `backward`: gradients by a kernel of Triton."""

    name: str
    asks: str
    tensors: Mapping[str, str]
    truth: Callable[..., Tensor]
    eager: Callable[..., Tensor]
    numbers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    backward: bool = False

    def by_kernels(self, language: str) -> bool:
        """Whether kernels for the gradients are asked for; a backward launches Triton's only."""
        return self.backward and language == "triton"

    @property
    def signature(self) -> str:
        """The arguments as the prompt gives them."""
        given = [f"{n}=None" if kind == OPTIONAL else n for n, kind in self.tensors.items()]
        return ", ".join([*given, *(f"{n}={v[0]!r}" for n, v in self.numbers.items())])

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*self.tensors, *self.numbers)


def find(name: str) -> Request:
    """The request of this name; raises BadSetting with the closest ones if there is none."""
    if name in REQUESTS:
        return REQUESTS[name]
    close = difflib.get_close_matches(name, REQUESTS, 3) or list(REQUESTS)
    raise BadSetting("NAME", f"there is no request {name!r}; did you mean {', '.join(close)}?")


def _float(*tensors: Tensor) -> tuple[Tensor, ...]:
    """16 bits to float32; float32 and float64 as they are."""
    return tuple(t.float() if t.element_size() == 2 else t for t in tensors)


def _softcap(input: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(input / cap)


def _squared_relu(input: Tensor) -> Tensor:
    return F.relu(input).square()


def _row_softmax(input: Tensor, scale: float) -> Tensor:
    return torch.softmax(input * scale, -1)


def _norm_then_gate(input: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = input * torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + eps)
    return (x if weight is None else x * weight) * F.silu(gate)


def _eager_norm_then_gate(input: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    (x,) = _float(input)
    x = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(input.dtype)
    x = x if weight is None else weight * x
    return (x.float() * F.silu(gate.float())).to(input.dtype)


def _snake(input: Tensor, alpha: Tensor) -> Tensor:
    return input + torch.sin(alpha * input).square() / alpha


def _reglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.relu(gate) * up


def _scaled_residual(residual: Tensor, input: Tensor, gamma: Tensor) -> Tensor:
    return residual + gamma * input


def _mish(input: Tensor) -> Tensor:
    return input * torch.tanh(F.softplus(input))


def _clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _plus_one_rmsnorm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    (x,) = _float(input)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x * (1 + _float(weight)[0])).to(input.dtype)


_ALL = (
    Request(
        "softcap",
        "cap · tanh(input / cap), as Gemma 2 caps its logits; cap is above zero",
        {"input": ROWS},
        _softcap,
        _softcap,
        numbers={"cap": (30.0, 50.0, 1.5)},
        limits={"cap": 0.0},
    ),
    Request(
        "squared_relu",
        "max(input, 0)², as in Primer and Nemotron",
        {"input": ROWS},
        _squared_relu,
        _squared_relu,
        backward=True,
    ),
    Request(
        "row_softmax",
        "softmax(scale · input) over the last dimension, for rows of up to 8192",
        {"input": ROWS},
        _row_softmax,
        _row_softmax,
        numbers={"scale": (1.0, 0.125, -2.0)},
    ),
    Request(
        "norm_then_gate",
        "RMSNorm(input) · weight · SiLU(gate): the norm of the input alone, gated afterwards, "
        "as in Qwen3-Next",
        {"input": ROWS, "gate": ROWS, "weight": OPTIONAL},
        _norm_then_gate,
        _eager_norm_then_gate,
        numbers={"eps": (1e-6, 0.1)},
        limits={"eps": -1.0},
    ),
    Request(
        "snake",
        "input + sin²(alpha · input) / alpha with an alpha for each column, as in BigVGAN",
        {"input": ROWS, "alpha": VECTOR},
        _snake,
        _snake,
    ),
    Request(
        "reglu",
        "max(gate, 0) · up of two tensors",
        {"gate": ROWS, "up": ROWS},
        _reglu,
        _reglu,
        backward=True,
    ),
    Request(
        "scaled_residual",
        "residual + gamma · input with a gamma for each column (LayerScale)",
        {"residual": ROWS, "input": ROWS, "gamma": VECTOR},
        _scaled_residual,
        _scaled_residual,
    ),
    Request(
        "mish",
        "input · tanh(log(1 + exp(input))), right for large |input| too",
        {"input": ROWS},
        _mish,
        _mish,
    ),
    Request(
        "clamped_swiglu",
        "(u + 1) · g · sigmoid(alpha · g) with g = min(gate, limit) and u = up clamped to "
        "±limit, as in gpt-oss",
        {"gate": ROWS, "up": ROWS},
        _clamped_swiglu,
        _clamped_swiglu,
        numbers={"limit": (7.0, 1.0), "alpha": (1.702, 1.0)},
    ),
    Request(
        "plus_one_rmsnorm",
        "RMSNorm(input) · (1 + weight), in float32 up to one rounding at the end, as in Gemma",
        {"input": ROWS, "weight": VECTOR},
        _plus_one_rmsnorm,
        _plus_one_rmsnorm,
        numbers={"eps": (1e-6, 0.1)},
        limits={"eps": -1.0},
    ),
)
REQUESTS: Mapping[str, Request] = {request.name: request for request in _ALL}
