"""norm_then_gate: RMSNorm of a row, gated afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelwright.ops import checks
from kernelwright.ops.folder_kernels import FolderKernels
from kernelwright.ops.op import Op

from . import cases, reference

__all__ = ["norm_then_gate"]


def norm_then_gate(
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = input / sqrt(mean(input^2) + eps) * weight * SiLU(gate), over the last dimension.

    Args:
        input, gate: [..., D], one dtype; any strides.
        weight: [D] or None, in any dtype.
        out: [..., D] to write into.
        exact: "transformers" keeps the bits of the same formula in eager PyTorch.
        backend: "torch" or "cuda"; None takes the one of `use_backend`, or the fastest.

    >>> norm_then_gate(torch.tensor([[3.0, 4.0]]), torch.ones(1, 2), eps=0.0)
    tensor([[0.6203, 0.8271]])
    """
    how = {"out": out, "exact": exact, "backend": backend}
    return NORM_THEN_GATE(input, gate, weight, eps, **how)


def _check(input: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> None:
    checks.tensor("norm_then_gate", "input", input)
    checks.like("norm_then_gate", "gate", gate, input, "input")
    checks.vector("norm_then_gate", "weight", weight, input.shape[-1])


NORM_THEN_GATE = Op(
    name="norm_then_gate",
    schema="(Tensor input, Tensor gate, Tensor? weight=None, float eps=1e-6) -> Tensor",
    formula="RMSNorm(input) · weight · SiLU(gate)",
    check=_check,
    allocate=lambda input, gate, weight, eps: (torch.empty_like(input),),
    reference=reference.norm_then_gate,
    exact={"transformers": reference.eager},
    kernels=FolderKernels(__name__),
    backends=("torch", "cuda"),
    category="norm",
    cases=cases.CASES,
    sized=cases.sized,
)
