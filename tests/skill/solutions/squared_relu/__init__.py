"""squared_relu: the square of the positive part."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelwright.ops import checks
from kernelwright.ops.folder_kernels import FolderKernels
from kernelwright.ops.op import Op

from . import backward, cases, reference

__all__ = ["squared_relu"]


def squared_relu(
    input: Tensor,
    out: Tensor | None = None,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = max(x, 0)^2

    Args:
        input: [..., D], float16, bfloat16 or float32; any strides.
        out: [..., D] to write into.
        exact: "torch" keeps the bits of the same formula in eager PyTorch.
        backend: "torch" or "triton"; None takes the one of `use_backend`, or the fastest.

    >>> squared_relu(torch.tensor([-1.0, 1.0, 2.0]))
    tensor([0., 1., 4.])
    """
    return SQUARED_RELU(input, out=out, exact=exact, backend=backend)


def _check(input: Tensor) -> None:
    checks.tensor("squared_relu", "input", input)


SQUARED_RELU = Op(
    name="squared_relu",
    schema="(Tensor input) -> Tensor",
    formula="max(x, 0)²",
    check=_check,
    allocate=lambda input: (torch.empty_like(input),),
    reference=reference.squared_relu,
    exact={"torch": reference.eager},
    kernels=FolderKernels(__name__),
    backends=("torch", "triton"),
    backward=backward.Gradients(),
    category="activation",
    cases=cases.CASES,
    sized=cases.sized,
)
