"""Linear and GELU in plain PyTorch: the reference, and the eager chain that models run."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: bool = True
) -> Tensor:
    """GELU(x @ weight^T + bias): x [..., K], weight [N, K], bias [N] -> [..., N]."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh" if approximate else "none")
