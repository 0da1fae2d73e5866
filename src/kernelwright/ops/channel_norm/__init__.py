"""RMSNorm over the channels of an image or video [B, C, ...], optionally followed by SiLU.

A step of VAEs, not a public op. The row kernel would need the channels last: two transposes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..folder_kernels import FolderKernels
from ..op import Op
from . import reference

ACTIVATIONS = ("none", "silu")


def _check(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    activation: str,
    eps: float,
) -> None:
    op = "channel_norm"
    checks.tensor(op, "x", x, min_dims=3)
    checks.choice(op, "activation", activation, ACTIVATIONS)
    batch, channels = x.shape[:2]
    checks.vector(op, "weight", weight, channels, "x")
    for name, value in {"scale": scale, "shift": shift}.items():
        if value is None:
            continue
        checks.tensor(op, name, value)
        ones = [1] * (x.ndim - 2)
        if list(value.shape) not in ([batch, channels, *ones], [1, channels, *ones]):
            raise ValueError(
                f"{op}: {name} has shape {list(value.shape)}, "
                f"expected {[batch, channels, *ones]} for x {list(x.shape)}"
            )
    checks.one_dtype(op, {"scale": scale, "shift": shift})


CHANNEL_NORM = Op(
    name="channel_norm",
    schema="(Tensor x, Tensor? weight, Tensor? scale, Tensor? shift, str activation, float eps) "
    "-> Tensor",
    formula="act(x / √(mean(x²) + eps) · weight · (1 + scale) + shift), the mean over dimension 1",
    check=_check,
    allocate=lambda x, *rest: (torch.empty_like(x),),
    reference=reference.channel_norm,
    kernels=FolderKernels(__name__),
    cases=(),
    sized=lambda inputs, rows, width, chain: {"x": inputs.normal(1, width, rows)},
    prefer=("triton",),
    backends=("torch", "triton"),
    internal=True,
)
