"""What F.rms_norm adds to the mean square if it is given no eps."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F


@cache
def default_eps(dtype: torch.dtype, device: torch.device) -> float:
    """It depends on the version of PyTorch: the eps of the dtype, or of float32, in which it
    computes. A meta tensor cannot tell."""
    guesses = (torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    if device.type == "meta":
        return guesses[0]
    x = torch.full((1, 8), 2.0**-10, dtype=dtype, device=device)
    y = float(F.rms_norm(x, (8,))[0, 0])
    return min(guesses, key=lambda eps: abs(2.0**-10 * (2.0**-20 + eps) ** -0.5 - y))
