"""GELU by itself: at the speed of a copy; exact="torch" keeps PyTorch's bits."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..folder_kernels import FolderKernels
from ..glu.backward import GluBackward
from ..op import Op
from . import cases, reference

__all__ = ["gelu"]


def gelu(
    input: Tensor,
    approximate: bool = True,
    out: Tensor | None = None,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = input * Φ(input), Φ the normal distribution: 0.5 * input * (1 + erf(input / √2)).

    Args:
        input: [..., H].
        approximate: the tanh form of Φ, or with False the erf form (PyTorch's default).
        out: [..., H] to write into: a part of wider rows, say, or the input itself.
        exact: "torch" keeps the bits of F.gelu.

    >>> gelu(torch.tensor([[2.0, -1.0]]), approximate=False)
    tensor([[ 1.9545, -0.1587]])
    """
    return GELU.run(input, approximate, out=out, exact=exact, backend=backend)


def _check(input: Tensor, approximate: bool) -> None:
    checks.tensor("gelu", "input", input)
    checks.choice("gelu", "approximate", approximate, (True, False))


GELU = Op(
    name="gelu",
    schema="(Tensor input, bool approximate=True) -> Tensor",
    formula="input · Φ(input)",
    check=_check,
    allocate=lambda input, approximate: (torch.empty_like(input),),
    reference=reference.gelu,
    exact={"torch": reference.eager},
    kernels=FolderKernels(__name__),
    backward=GluBackward(activation="gelu", b=""),
    cases=cases.GELU,
    sized=cases.sized,
    # on H200 43.8 against 45.7 us at 5376x8192; the erf form 121 against 76 at 4096x18176
    prefer=lambda input, approximate: ("triton", "cuda") if approximate else ("cuda", "triton"),
)
