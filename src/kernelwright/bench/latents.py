"""How far the latents at the end of a denoising run are from eager's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

STEPS = 30


def denoises(inputs: dict[str, Any]) -> bool:
    """Whether a model with these inputs predicts a velocity of its latents."""
    given = inputs.get("hidden_states"), inputs.get("timestep")
    return all(isinstance(t, Tensor) for t in given)


def last_latents(run: Callable[..., Any], inputs: dict[str, Any], steps: int = STEPS) -> Tensor:
    """Denoise by Euler's method, always from the same noise."""
    latents, whole = inputs["hidden_states"], inputs["timestep"]
    for step in range(steps):
        left = (whole * (1 - step / steps)).to(whole.dtype)
        result = run(**{**inputs, "hidden_states": latents, "timestep": left})
        velocity = result[0] if not isinstance(result, Tensor) else result
        latents = latents - velocity / steps
    return latents


def psnr(result: Tensor, expected: Tensor) -> float:
    """The peak signal-to-noise ratio in dB, with the range of `expected` as the peak.

    >>> import torch
    >>> psnr(torch.tensor([0.1, 1.0]), torch.tensor([0.0, 1.0]))
    23.01...
    """
    off = (result.double() - expected.double()).square().mean().item()
    peak = (expected.max() - expected.min()).item()
    return math.inf if off == 0 else 10 * math.log10(peak**2 / off)
