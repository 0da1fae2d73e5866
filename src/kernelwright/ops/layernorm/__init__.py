"""LayerNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..op import Op
from ..row import RowKernel, by_width
from ..row.backward import RowBackward
from . import cases, reference

__all__ = ["layernorm"]


def layernorm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    out: Tensor | None = None,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension.

    Args:
        input: [..., D], float16, bfloat16 or float32; any strides.
        weight, bias: [D] or None.
        out: [..., D] to write into.
        exact: keep the bits of an eager chain: "torch" (F.layer_norm) or "wan" (F.layer_norm of
            the float32 row, rounded once: FP32LayerNorm).
        backend: "torch", "triton", "cuda"; None takes the one of `use_backend`, or the fastest.

    >>> layernorm(torch.tensor([[1.0, 3.0]]))
    tensor([[-1.0000,  1.0000]])
    """
    return LAYERNORM.run(input, weight, bias, eps, out=out, exact=exact, backend=backend)


def _check(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    checks.tensor("layernorm", "input", input)
    checks.vector("layernorm", "weight", weight, input.shape[-1])
    checks.vector("layernorm", "bias", bias, input.shape[-1])
    checks.one_dtype("layernorm", {"weight": weight, "bias": bias})


_LAYERNORM_ROW = RowKernel(norm="layer", weight="weight", bias="bias")
LAYERNORM = Op(
    name="layernorm",
    schema="(Tensor input, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> Tensor",
    formula="(x - mean(x)) / sqrt(var(x) + eps) · weight + bias",
    check=_check,
    allocate=lambda input, weight, bias, eps: (torch.empty_like(input),),
    reference=reference.layernorm,
    exact=reference.CHAINS,
    kernels=_LAYERNORM_ROW,
    backward=RowBackward(_LAYERNORM_ROW),
    cases=cases.LAYERNORM,
    sized=cases.sized,
    prefer=by_width,
)
