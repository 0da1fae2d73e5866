"""RMSNorm over the channels of an image or video, in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..row.reference import affine, modulated, normalize, widen


def channel_norm(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    activation: str,
    eps: float,
) -> Tensor:
    rows = affine(normalize(widen(x).movedim(1, -1), "rms", eps), weight)
    y = modulated(rows.movedim(-1, 1), scale, shift)
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)
