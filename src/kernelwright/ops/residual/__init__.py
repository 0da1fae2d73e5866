"""Gated residual add, alone and with the norm and modulation that follow it in a DiT block."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..op import Op
from ..row import RowKernel, by_width
from ..row.backward import RowBackward
from . import cases, reference

__all__ = ["gated_residual", "gated_residual_norm"]


def gated_residual(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = residual + gate * x

    Args:
        residual, x: [..., D], one dtype.
        gate: [D], [B, D], [B, 1, D], [B, S, D] or [B, F, 1, D], or None.
        out: [..., D] to write into; may be `residual` itself.
        exact: "diffusers" (gate * x rounded, then the sum) or "wan" (float32 between).

    >>> gated_residual(torch.ones(1, 2), torch.ones(1, 2), torch.full((2,), 0.5))
    tensor([[1.5000, 1.5000]])
    """
    return GATED_RESIDUAL.run(residual, x, gate, out=out, exact=exact, backend=backend)


def gated_residual_norm(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    kind: str = "rms",
    eps: float = 1e-6,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """s = residual + gate * x;  y = (norm(s) * weight + bias) * (1 + scale) + shift.
    Returns (y, s).

    Args:
        residual, x: [..., D], one dtype.
        gate, scale, shift: [D], [B, D], [B, 1, D], [B, S, D] or [B, F, 1, D], or None.
        weight, bias: [D] or None.
        kind: "rms" or "layer".
        out, residual_out: [..., D] to write y and s into; residual_out may be `residual` itself.
        exact: "diffusers", "transformers" or "torch" by the norm they use, "wan" for float32
            between the steps.

    >>> y, s = gated_residual_norm(torch.ones(1, 2), torch.ones(1, 2), kind="layer")
    >>> s
    tensor([[2., 2.]])
    """
    given = None if out is None and residual_out is None else (out, residual_out)
    return GATED_RESIDUAL_NORM.run(
        residual,
        x,
        gate,
        weight,
        bias,
        scale,
        shift,
        kind,
        eps,
        out=given,
        exact=exact,
        backend=backend,
    )


def _check(residual: Tensor, x: Tensor, gate: Tensor | None) -> None:
    op = "gated_residual"
    checks.tensor(op, "residual", residual)
    checks.like(op, "x", x, residual, "residual")
    checks.modulation(op, "gate", gate, residual, "residual")


def _check_norm(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    kind: str,
    eps: float,
) -> None:
    op = "gated_residual_norm"
    checks.tensor(op, "residual", residual)
    checks.like(op, "x", x, residual, "residual")
    checks.choice(op, "kind", kind, ("rms", "layer"))
    affine = {"weight": weight, "bias": bias}
    for name, value in affine.items():
        checks.vector(op, name, value, residual.shape[-1], "residual")
    parts = {"gate": gate, "scale": scale, "shift": shift}
    for name, value in parts.items():
        checks.modulation(op, name, value, residual, "residual")
    checks.one_dtype(op, affine)
    checks.one_dtype(op, parts)


_GATED_RESIDUAL_ROW = RowKernel(
    norm="none", x="x", residual="residual", gate="gate", sum="out", y=""
)
GATED_RESIDUAL = Op(
    name="gated_residual",
    schema="(Tensor residual, Tensor x, Tensor? gate=None) -> Tensor",
    formula="residual + gate · x",
    check=_check,
    allocate=lambda residual, x, gate: (torch.empty_like(residual),),
    reference=reference.gated_residual,
    exact=reference.GATED_RESIDUAL_CHAINS,
    kernels=_GATED_RESIDUAL_ROW,
    backward=RowBackward(_GATED_RESIDUAL_ROW),
    category="modulation",
    cases=cases.GATED_RESIDUAL,
    sized=cases.sized,
    prefer=by_width,
)

_GATED_RESIDUAL_NORM_ROW = RowKernel(
    norm="kind",
    x="x",
    residual="residual",
    gate="gate",
    weight="weight",
    bias="bias",
    scale="scale",
    shift="shift",
    sum="residual_out",
)
GATED_RESIDUAL_NORM = Op(
    name="gated_residual_norm",
    schema="(Tensor residual, Tensor x, Tensor? gate=None, Tensor? weight=None, Tensor? bias=None, "
    'Tensor? scale=None, Tensor? shift=None, str kind="rms", float eps=1e-6) -> (Tensor, Tensor)',
    formula="s = residual + gate · x; (norm(s) · weight + bias) · (1 + scale) + shift",
    outputs=("out", "residual_out"),
    check=_check_norm,
    allocate=lambda residual, *_: (torch.empty_like(residual), torch.empty_like(residual)),
    reference=reference.gated_residual_norm,
    exact=reference.GATED_RESIDUAL_NORM_CHAINS,
    kernels=_GATED_RESIDUAL_NORM_ROW,
    backward=RowBackward(_GATED_RESIDUAL_NORM_ROW),
    cases=cases.GATED_RESIDUAL_NORM,
    sized=cases.sized_norm,
    prefer=by_width,
)
