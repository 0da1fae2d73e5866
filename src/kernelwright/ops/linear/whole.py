"""The eager chain as one torch.library op: torch.compile takes it whole, and keeps its bits.

Inductor splits F.linear and F.gelu and rounds in other places than eager does. The gradient runs
the chain again and takes the gradient of that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import library
from .reference import linear_gelu

ARGUMENTS = "Tensor x, Tensor weight, Tensor? bias, bool approximate"


def node(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: bool) -> Tensor:
    """GELU(x @ weight^T + bias) as one node of a graph."""
    return torch.ops.kernelwright.linear_gelu.default(x, weight, bias, approximate)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _backward(grad: Tensor, *values: Any) -> list[Tensor]:
    *tensors, approximate, wanted = values
    leaves = [t.detach().requires_grad_() if w else t for t, w in zip(tensors, wanted, strict=True)]
    with torch.enable_grad():
        out = linear_gelu(leaves[0], leaves[1], leaves[2], approximate)
    sources = [t for t, w in zip(leaves, wanted, strict=True) if w]
    got = torch.autograd.grad(out, sources, grad)
    return [torch.empty_like(s).copy_(g) for g, s in zip(got, sources, strict=True)]


def _fake_backward(grad: Tensor, *values: Any) -> list[Tensor]:
    *tensors, _, wanted = values
    return [torch.empty_like(t) for t, w in zip(tensors, wanted, strict=True) if w]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.approximate = inputs
    ctx.save_for_backward(x, weight, bias)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    wanted = [bool(n) for n in ctx.needs_input_grad[:3]]
    backward = torch.ops.kernelwright.linear_gelu_backward.default
    got = iter(backward(grad, *ctx.saved_tensors, ctx.approximate, wanted))
    return (*(next(got) if w else None for w in wanted), None)


def _register() -> None:
    lib, space = library._library, library.NAMESPACE
    lib.define(f"linear_gelu({ARGUMENTS}) -> Tensor")
    lib.define(f"linear_gelu_backward(Tensor grad, {ARGUMENTS}, bool[] wanted) -> Tensor[]")
    for name, run, fake in (
        ("linear_gelu", linear_gelu, _fake),
        ("linear_gelu_backward", _backward, _fake_backward),
    ):
        lib.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{space}::{name}", fake, lib=lib)
    torch.library.register_autograd(
        f"{space}::linear_gelu", _gradient, setup_context=_setup, lib=lib
    )


_register()
