"""Sums along rows: the op whose kernel repeats each, and what stands for the kernel on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..ops import ways
from ..ops.case import Inputs
from ..ops.op import Op, registry
from ..ops.plan import How, LaunchPlan
from ..ops.row.order import mean_order
from .trees import tree_of

# by subject: an op, and the eager chain of it that has this sum
SUMS = {
    "at::mean": ("rmsnorm", "diffusers"),
    "F.rms_norm": ("rmsnorm", "torch"),
    "F.layer_norm": ("layernorm", "torch"),
}
# (rows, width, dtype): heads, one warp a row, more; at::mean gives few rows more threads each
SIZES = (
    (4096, 64, torch.bfloat16),
    (4096, 128, torch.bfloat16),
    (2048, 2048, torch.bfloat16),
    (2048, 3072, torch.bfloat16),
    (3, 2048, torch.bfloat16),
    (1024, 2048, torch.float32),
)
# without a GPU trees are summed node by node
CPU_SIZES = ((256, 64, torch.bfloat16), (64, 256, torch.bfloat16), (64, 256, torch.float32))
DRAWS = ((0, 1.0, 0.0), (1, 3.0, 0.5))  # seed, scale and mean


def sizes(device: str) -> tuple[tuple[int, int, torch.dtype], ...]:
    return SIZES if device == "cuda" else CPU_SIZES


def arguments(
    subject: str, rows: int, width: int, dtype: torch.dtype, device: str
) -> Iterator[list[Any]]:
    """The arguments of the op, several times."""
    name, chain = SUMS[subject]
    op = _op(name)
    for seed, scale, mean in DRAWS:
        given = op.sized(Inputs(dtype, device, seed, scale, mean), rows, width, chain)
        yield [given[n] for n in op.arguments]


def expected(subject: str, args: list[Any]) -> Tensor:
    name, chain = SUMS[subject]
    return _op(name).exact[chain](*args)


def computed(subject: str, args: list[Any]) -> Tensor:
    """What the kernel makes of the arguments. Raises Unsupported if there is none of this size."""
    name, chain = SUMS[subject]
    if args[0].device.type != "cuda":
        return modelled(subject, *args)
    # a plan of its own: those that the op keeps are of the way in use
    how = How(chain, "cuda", inplace=False, strict=True)
    return LaunchPlan(_op(name), tuple(args), None, how, 16).follow(tuple(args), None)


def modelled(subject: str, input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The norm whose sum has the tree of a subject, in plain steps: what its kernel computes, but
    for the GPU's own functions."""
    way, (rows, width) = ways.way(subject), input.shape
    tree = tree_of(subject, way, width, rows, input.dtype.itemsize)
    if tree is None:
        raise ways.Unsupported(f"{subject} of {width} has no tree")
    x = input.float()
    if subject == "at::mean":
        mean = tree.sum(x * x) * torch.tensor(mean_order(width, rows, 1).factor)
        y = input * torch.rsqrt(mean + eps)[:, None]
        y = y.to(input.dtype)
        return y if weight is None else y * weight
    total = tree.sum(x * x, squares_of=x)
    scale = torch.rsqrt(total / width + torch.tensor(eps, dtype=torch.float32))
    y = x * scale[:, None]
    return (y if weight is None else y * weight.float()).to(input.dtype)


def _op(name: str) -> Op:
    op = registry()[name]
    assert isinstance(op, Op)
    return op
