"""Adaptive norms: modulation alone, and norm with modulation in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..op import Op
from ..row import RowKernel, by_width
from ..row.backward import RowBackward
from . import cases, reference

__all__ = ["adaln_layernorm", "adaln_rmsnorm", "adaln_zero", "modulate"]


def modulate(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    out: Tensor | None = None,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = x * (1 + scale) + shift

    Args:
        x: [..., D].
        scale, shift: [D], [B, D], [B, 1, D], [B, S, D] or [B, F, 1, D] (F frames of S / F tokens),
            or None; views of a `chunk` or `unbind` are read in place.
        exact: "diffusers" rounds after each step as eager tensors of x's dtype do; "wan" keeps
            float32 between the steps.

    >>> modulate(torch.ones(1, 2), torch.ones(2), torch.zeros(2))
    tensor([[2., 2.]])
    """
    return MODULATE.run(x, scale, shift, out=out, exact=exact, backend=backend)


def adaln_rmsnorm(
    input: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = rmsnorm(x) * weight * (1 + scale) + shift

    Args:
        input: [..., D].
        weight: [D] or None.
        scale, shift: as in `modulate`.
        exact: "diffusers" (its RMSNorm, then modulation) or "torch" (F.rms_norm, then modulation).

    >>> adaln_rmsnorm(torch.tensor([[3.0, 4.0]]), None, torch.ones(2), None)
    tensor([[1.6971, 2.2627]])
    """
    return ADALN_RMSNORM.run(
        input, weight, scale, shift, eps, out=out, exact=exact, backend=backend
    )


def adaln_layernorm(
    input: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    out: Tensor | None = None,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = (layernorm(x) * weight + bias) * (1 + scale) + shift

    Args:
        input: [..., D].
        weight, bias: [D] or None.
        scale, shift: as in `modulate`.
        exact: "diffusers" (F.layer_norm, then modulation: FLUX, SD3, PixArt) or "wan" (all of it
            in float32, rounded once).

    >>> adaln_layernorm(torch.tensor([[1.0, 3.0]]), None, torch.ones(2), torch.ones(2))
    tensor([[-1.0000,  3.0000]])
    """
    return ADALN_LAYERNORM.run(
        input, weight, scale, shift, bias, eps, out=out, exact=exact, backend=backend
    )


def adaln_zero(
    input: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    gate: Tensor | None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = (rmsnorm(x) * weight * (1 + scale) + shift) * gate

    DiT blocks gate the output of a branch, not its input: for them use `gated_residual_norm`.

    Args:
        input: [..., D].
        weight: [D] or None.
        scale, shift, gate: as in `modulate`.
        exact: "diffusers" or "torch", as in `adaln_rmsnorm`.

    >>> adaln_zero(torch.tensor([[3.0, 4.0]]), None, None, None, torch.zeros(2))
    tensor([[0., 0.]])
    """
    return ADALN_ZERO.run(
        input, weight, scale, shift, gate, eps, out=out, exact=exact, backend=backend
    )


def _check(op: str, x: Tensor, name: str = "input", **parts: Tensor | None) -> None:
    checks.tensor(op, name, x)
    affine: dict[str, Tensor | None] = {n: parts.pop(n) for n in ("weight", "bias") if n in parts}
    for n, t in affine.items():
        checks.vector(op, n, t, x.shape[-1], name)
    checks.one_dtype(op, affine)
    for n, t in parts.items():
        checks.modulation(op, n, t, x, name)
    checks.one_dtype(op, parts)


_MODULATE_ROW = RowKernel(norm="none", x="x", scale="scale", shift="shift")
MODULATE = Op(
    name="modulate",
    schema="(Tensor x, Tensor? scale, Tensor? shift) -> Tensor",
    formula="x · (1 + scale) + shift",
    check=lambda x, scale, shift: _check("modulate", x, "x", scale=scale, shift=shift),
    allocate=lambda x, scale, shift: (torch.empty_like(x),),
    reference=reference.modulate,
    exact=reference.MODULATE_CHAINS,
    kernels=_MODULATE_ROW,
    backward=RowBackward(_MODULATE_ROW),
    category="modulation",
    cases=cases.MODULATE,
    sized=cases.sized_modulate,
)

_ADALN_RMSNORM_ROW = RowKernel(norm="rms", weight="weight", scale="scale", shift="shift")
ADALN_RMSNORM = Op(
    name="adaln_rmsnorm",
    schema="(Tensor input, Tensor? weight, Tensor? scale, Tensor? shift, float eps=1e-6) -> Tensor",
    formula="rmsnorm(x) · weight · (1 + scale) + shift",
    check=lambda input, weight, scale, shift, eps: _check(
        "adaln_rmsnorm", input, weight=weight, scale=scale, shift=shift
    ),
    allocate=lambda input, *_: (torch.empty_like(input),),
    reference=reference.adaln_rmsnorm,
    exact=reference.ADALN_RMSNORM_CHAINS,
    kernels=_ADALN_RMSNORM_ROW,
    backward=RowBackward(_ADALN_RMSNORM_ROW),
    cases=cases.ADALN_RMSNORM,
    sized=cases.sized_rmsnorm,
    prefer=by_width,
)

_ADALN_LAYERNORM_ROW = RowKernel(
    norm="layer", weight="weight", bias="bias", scale="scale", shift="shift"
)
ADALN_LAYERNORM = Op(
    name="adaln_layernorm",
    schema="(Tensor input, Tensor? weight, Tensor? scale, Tensor? shift, Tensor? bias=None, "
    "float eps=1e-5) -> Tensor",
    formula="(layernorm(x) · weight + bias) · (1 + scale) + shift",
    check=lambda input, weight, scale, shift, bias, eps: _check(
        "adaln_layernorm", input, weight=weight, bias=bias, scale=scale, shift=shift
    ),
    allocate=lambda input, *_: (torch.empty_like(input),),
    reference=reference.adaln_layernorm,
    exact=reference.ADALN_LAYERNORM_CHAINS,
    kernels=_ADALN_LAYERNORM_ROW,
    backward=RowBackward(_ADALN_LAYERNORM_ROW),
    cases=cases.ADALN_LAYERNORM,
    sized=cases.sized_layernorm,
    prefer=by_width,
)

_ADALN_ZERO_ROW = RowKernel(
    norm="rms", weight="weight", scale="scale", shift="shift", out_gate="gate"
)
ADALN_ZERO = Op(
    name="adaln_zero",
    schema="(Tensor input, Tensor? weight, Tensor? scale, Tensor? shift, Tensor? gate, "
    "float eps=1e-6) -> Tensor",
    formula="(rmsnorm(x) · weight · (1 + scale) + shift) · gate",
    check=lambda input, weight, scale, shift, gate, eps: _check(
        "adaln_zero", input, weight=weight, scale=scale, shift=shift, gate=gate
    ),
    allocate=lambda input, *_: (torch.empty_like(input),),
    reference=reference.adaln_zero,
    exact=reference.ADALN_ZERO_CHAINS,
    kernels=_ADALN_ZERO_ROW,
    backward=RowBackward(_ADALN_ZERO_ROW),
    category="norm",
    cases=cases.ADALN_ZERO,
    sized=cases.sized_zero,
    prefer=by_width,
)
