"""Norms and residuals before a linear layer that also write their result in fp8, in one pass.

The fp8 output equals `quantize` of the 16-bit output. Where it is not `wanted` it is empty and the
same kernel runs without it, so the 16-bit output has the same bits either way. None has a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..op import Op
from ..residual.reference import gated_residual, gated_residual_norm
from ..row import RowKernel, by_width
from ..row.reference import affine, modulated, normalize, widen
from . import reference
from .reference import DTYPE

Part = Tensor | None
EIGHT = {"eight": "eight", "eight_scale": "eight_scale", "wanted": "wanted"}
AFFINE = {"weight": "weight", "bias": "bias"}
MODULATION = {"scale": "scale", "shift": "shift"}
BRANCH = {"x": "x", "residual": "residual", "gate": "gate"}


def _eight(rows: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
    return reference.quantize(rows) if wanted else _room(rows, wanted)


def _room(rows: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
    shapes = (rows.shape, (*rows.shape[:-1], 1)) if wanted else ((0,), (0,))
    return (
        torch.empty(shapes[0], dtype=DTYPE, device=rows.device),
        torch.empty(shapes[1], dtype=torch.float32, device=rows.device),
    )


def _norm(
    x: Tensor,
    weight: Part,
    bias: Part,
    scale: Part,
    shift: Part,
    kind: str,
    eps: float,
    wanted: bool,
) -> tuple[Tensor, ...]:
    y = affine(normalize(widen(x), kind, eps), weight, bias)
    rows = modulated(y, scale, shift).to(x.dtype)
    return rows, *_eight(rows, wanted)


def _residual_norm(residual: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *parts, wanted = rest
    rows, total = gated_residual_norm(residual, x, *parts)
    return rows, total, *_eight(rows, wanted)


def _residual(residual: Tensor, x: Tensor, gate: Part, wanted: bool) -> tuple[Tensor, ...]:
    total = gated_residual(residual, x, gate)
    return total, *_eight(total, wanted)


def _check_residual(residual: Tensor, x: Tensor, gate: Part, wanted: bool) -> None:
    op = "residual_quantize"
    checks.tensor(op, "x", x)
    checks.like(op, "residual", residual, x, "x")
    checks.modulation(op, "gate", gate, x, "x")


def _check_residual_norm(
    residual: Tensor, x: Tensor, gate: Part, weight: Part, bias: Part, scale: Part, *rest: Any
) -> None:
    _check_residual(residual, x, gate, True)
    _check_norm(x, weight, bias, scale, *rest)
    checks.one_dtype("norm_quantize", {"gate": gate, "scale": scale})


def _check_norm(
    x: Tensor,
    weight: Part,
    bias: Part,
    scale: Part,
    shift: Part,
    kind: str,
    eps: float,
    wanted: bool,
) -> None:
    op = "norm_quantize"
    checks.tensor(op, "x", x)
    checks.choice(op, "kind", kind, ("rms", "layer"))
    for name, value in {"weight": weight, "bias": bias}.items():
        checks.vector(op, name, value, x.shape[-1], "x")
    for name, value in {"scale": scale, "shift": shift}.items():
        checks.modulation(op, name, value, x, "x")


NORM_QUANTIZE = Op(
    name="norm_quantize",
    schema="(Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, str kind, "
    "float eps, bool wanted) -> (Tensor, Tensor, Tensor)",
    formula="y = (norm(x) · weight + bias) · (1 + scale) + shift; q, s: q · s is y",
    check=_check_norm,
    allocate=lambda x, *rest: (torch.empty_like(x), *_room(x, rest[-1])),
    reference=_norm,
    kernels=RowKernel(norm="kind", x="x", **AFFINE, **MODULATION, **EIGHT),
    cases=(),
    sized=lambda inputs, rows, width, chain: {"x": inputs.normal(rows, width)},
    outputs=("out", "eight", "eight_scale"),
    prefer=by_width,
    internal=True,
)

RESIDUAL_NORM_QUANTIZE = Op(
    name="residual_norm_quantize",
    schema="(Tensor residual, Tensor x, Tensor? gate, Tensor? weight, Tensor? bias, Tensor? scale, "
    "Tensor? shift, str kind, float eps, bool wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    formula="s = residual + gate · x; y = (norm(s) · weight + bias) · (1 + scale) + shift; "
    "q, r: q · r is y",
    check=_check_residual_norm,
    allocate=lambda residual, *rest: (
        torch.empty_like(residual),
        torch.empty_like(residual),
        *_room(residual, rest[-1]),
    ),
    reference=_residual_norm,
    kernels=RowKernel(norm="kind", sum="total", **BRANCH, **AFFINE, **MODULATION, **EIGHT),
    cases=(),
    sized=lambda inputs, rows, width, chain: {"x": inputs.normal(rows, width)},
    outputs=("out", "total", "eight", "eight_scale"),
    prefer=by_width,
    internal=True,
)

RESIDUAL_QUANTIZE = Op(
    name="residual_quantize",
    schema="(Tensor residual, Tensor x, Tensor? gate, bool wanted) -> (Tensor, Tensor, Tensor)",
    formula="s = residual + gate · x; q, r: q · r is s",
    check=_check_residual,
    allocate=lambda residual, x, gate, wanted: (
        torch.empty_like(residual),
        *_room(residual, wanted),
    ),
    reference=_residual,
    kernels=RowKernel(norm="none", y="", sum="out", **BRANCH, **EIGHT),
    cases=(),
    sized=lambda inputs, rows, width, chain: {"x": inputs.normal(rows, width)},
    outputs=("out", "eight", "eight_scale"),
    prefer=by_width,
    internal=True,
)
