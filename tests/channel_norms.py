"""Calls of the norm over channels, the eager steps it replaces, and its error bound."""

import torch
import torch.nn.functional as F
from numerics import as_good_as_eager, errors_over_draws

from kernelwright.ops.channel_norm import CHANNEL_NORM
from kernelwright.ops.row.reference import diffusers_rms_norm, modulated

EPS = 1e-8


def normal(*shape, dtype=torch.bfloat16, device="cpu", seed=0):
    """Channels of different magnitude, so that mixing them up shows."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    sizes = torch.linspace(0.5, 2, shape[1]).unflatten(0, (-1, *[1] * (len(shape) - 2)))
    return (torch.randn(shape, generator=generator) * sizes).to(dtype).to(device)


# x [B, C, *positions] as a function of C: the outputs of convolutions, and views of them
LAYOUTS = {
    "positions of any number": lambda c, **how: normal(1, c, 3, 5, 9, **how),
    "multiples of eight": lambda c, **how: normal(2, c, 2, 4, 9, **how),
    "without the first frame": lambda c, **how: normal(2, c, 3, 4, 8, **how)[:, :, 1:],
    "every other batch": lambda c, **how: normal(4, c, 35, **how)[::2],
    "part of the channels": lambda c, **how: normal(2, c + 3, 5, 7, **how)[:, 3:],
    "expanded": lambda c, **how: normal(1, c, 5, 7, **how).expand(3, -1, -1, -1),
    "one position": lambda c, **how: normal(2, c, 1, 1, **how),
}


def parts(x, weighted, modulation):
    """weight [C], scale and shift [B, C, 1, ...] as slices of a table of several."""
    batch, channels = x.shape[:2]
    how = {"dtype": x.dtype, "device": x.device}
    weight = normal(1, channels, 1, **how)[0, :, 0] if weighted else None
    if not modulation:
        return weight, None, None
    table = normal(batch, 4 * channels, *[1] * (x.ndim - 2), **how).unflatten(1, (4, -1))
    return weight, table[:, 1], table[:, 2]


def eager(x, weight, scale, shift, activation, eps=EPS):
    """The steps of diffusers."""
    y = diffusers_rms_norm(x.movedim(1, -1), weight, eps).movedim(-1, 1)
    y = modulated(y, scale, shift)
    return F.silu(y) if activation == "silu" else y


def hold(x, weight=None, scale=None, shift=None, activation="silu"):
    """Call the kernel, check the error bound, and return the result."""
    parts = weight, scale, shift

    def truth(x):
        wide = [None if t is None else t.double() for t in (x, *parts)]
        return CHANNEL_NORM.reference(*wide, activation, EPS)

    def draw(seed):
        other = normal(*x.shape, dtype=x.dtype, device=x.device, seed=seed)
        return eager(other, *parts, activation), truth(other)

    got = CHANNEL_NORM(x, *parts, activation, EPS, backend="triton")
    expected = eager(x, *parts, activation)
    as_good_as_eager(got, truth(x), expected, errors_over_draws(draw, x.dtype))
    assert got.stride() == expected.stride()
    return got
