"""RMSNorm, alone and with the residual add before it."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..op import Op
from ..row import RowKernel, by_width
from ..row.backward import RowBackward
from . import cases, reference

__all__ = ["rmsnorm", "rmsnorm_residual"]


def rmsnorm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    Args:
        input: [..., D], float16, bfloat16 or float32; any strides.
        weight: [D] or None, in any of these dtypes.
        out: [..., D] to write into.
        exact: keep the bits of an eager chain: "torch" (F.rms_norm), "diffusers" (its RMSNorm) or
            "transformers" (LlamaRMSNorm).
        backend: "torch", "triton", "cuda"; None takes the one of `use_backend`, or the fastest.

    >>> rmsnorm(torch.tensor([[3.0, 4.0]]))
    tensor([[0.8485, 1.1314]])
    """
    return RMSNORM.run(input, weight, eps, out=out, exact=exact, backend=backend)


def rmsnorm_residual(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """s = input + residual;  y = s / sqrt(mean(s^2) + eps) * weight.  Returns (y, s).

    Args:
        input, residual: [..., D], one dtype.
        weight: [D] or None.
        out, residual_out: [..., D] to write y and s into; residual_out may be `residual` itself.
        exact: "torch", "diffusers" or "transformers", as in `rmsnorm`.

    >>> y, s = rmsnorm_residual(torch.ones(1, 2), torch.ones(1, 2))
    >>> s
    tensor([[2., 2.]])
    """
    given = None if out is None and residual_out is None else (out, residual_out)
    return RMSNORM_RESIDUAL.run(
        input, residual, weight, eps, out=given, exact=exact, backend=backend
    )


def _check(input: Tensor, weight: Tensor | None, eps: float) -> None:
    checks.tensor("rmsnorm", "input", input)
    checks.vector("rmsnorm", "weight", weight, input.shape[-1])


def _check_residual(input: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> None:
    checks.tensor("rmsnorm_residual", "input", input)
    checks.like("rmsnorm_residual", "residual", residual, input, "input")
    checks.vector("rmsnorm_residual", "weight", weight, input.shape[-1])


_RMSNORM_ROW = RowKernel(norm="rms", weight="weight")
RMSNORM = Op(
    name="rmsnorm",
    schema="(Tensor input, Tensor? weight=None, float eps=1e-6) -> Tensor",
    formula="x / sqrt(mean(x²) + eps) · weight",
    check=_check,
    allocate=lambda input, weight, eps: (torch.empty_like(input),),
    reference=reference.rmsnorm,
    exact=reference.RMSNORM_CHAINS,
    kernels=_RMSNORM_ROW,
    backward=RowBackward(_RMSNORM_ROW),
    cases=cases.RMSNORM,
    sized=cases.sized,
    prefer=by_width,
)

_RMSNORM_RESIDUAL_ROW = RowKernel(
    norm="rms", residual="residual", weight="weight", sum="residual_out"
)
RMSNORM_RESIDUAL = Op(
    name="rmsnorm_residual",
    schema="(Tensor input, Tensor residual, Tensor? weight=None, float eps=1e-6) "
    "-> (Tensor, Tensor)",
    formula="s = input + residual; s / sqrt(mean(s²) + eps) · weight",
    outputs=("out", "residual_out"),
    check=_check_residual,
    allocate=lambda input, residual, weight, eps: (
        torch.empty_like(input),
        torch.empty_like(input),
    ),
    reference=reference.rmsnorm_residual,
    exact=reference.RMSNORM_RESIDUAL_CHAINS,
    kernels=_RMSNORM_RESIDUAL_ROW,
    backward=RowBackward(_RMSNORM_RESIDUAL_ROW),
    cases=cases.RMSNORM_RESIDUAL,
    sized=cases.sized_residual,
    prefer=by_width,
)
