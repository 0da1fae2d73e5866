"""The norm over channels in Triton: a program holds all channels of some neighbouring positions, so
it reads them once, with coalesced loads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ...backends import Unsupported
from ...backends.triton import TritonLaunch
from ..glu.triton import activate
from .limits import problem

if TYPE_CHECKING:
    from torch import Tensor

    from ..plan import Call


@triton.jit
def of_channels(p, i_batch, o_c, m_c, batch, channel, ABSENT: tl.constexpr):
    """A value for each channel [C, 1]; ABSENT, the neutral element, if there is no tensor."""
    if p is not None:
        return tl.load(p + i_batch * batch + o_c * channel, mask=m_c, other=0.0).to(tl.float32)
    else:
        return ABSENT


@triton.jit(
    do_not_specialize=[
        "groups",
        "tiles",
        "x_batch",
        "x_channel",
        "y_batch",
        "y_channel",
        "scale_batch",
        "scale_channel",
        "shift_batch",
        "shift_channel",
    ]
)
def channel_norm_kernel(
    x,
    weight,
    scale,
    shift,
    y,
    groups,
    tiles,
    x_batch,
    x_channel,
    y_batch,
    y_channel,
    scale_batch,
    scale_channel,
    shift_batch,
    shift_channel,
    eps,
    C: tl.constexpr,
    CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
    ACT: tl.constexpr,
):
    # positions and strides come in units of GROUP: the compiler sees what they are multiples of
    i = tl.program_id(0).to(tl.int64)
    i_batch = i // tiles
    o_p = (i % tiles * POSITIONS + tl.arange(0, POSITIONS))[None, :]
    o_c = tl.arange(0, CHANNELS).to(tl.int64)[:, None]
    m_c = o_c < C
    m = m_c & (o_p < groups.to(tl.int64) * GROUP)

    o_x = i_batch * (x_batch.to(tl.int64) * GROUP) + o_c * (x_channel.to(tl.int64) * GROUP)
    b_x = tl.load(x + o_x + o_p, mask=m, other=0.0).to(tl.float32)
    b_weight = of_channels(weight, 0, o_c, m_c, 0, 1, 1.0)
    b_scale = of_channels(scale, i_batch, o_c, m_c, scale_batch, scale_channel, 0.0)
    b_shift = of_channels(shift, i_batch, o_c, m_c, shift_batch, shift_channel, 0.0)

    b_mean = tl.sum(b_x * b_x, 0) / C + eps
    # one value per position, so correct rounding is cheap; the later steps add errors of their own
    b_rstd = tl.div_rn(1.0 + 0.0 * b_mean, tl.sqrt_rn(b_mean))[None, :]
    b_y = b_x * b_rstd * b_weight * (1.0 + b_scale) + b_shift
    if ACT != "none":
        b_y = activate(b_y, ACT)
    o_y = i_batch * (y_batch.to(tl.int64) * GROUP) + o_c * (y_channel.to(tl.int64) * GROUP)
    tl.store(y + o_y + o_p, b_y.to(y.dtype.element_ty), mask=m)


# Elements of a program and of a thread, and the fewest and most positions of a program. Tuned on
# H200, us: 17.6 at 512x19968 (32 positions 19.3, 16 warps), 52.1 at 256x153600 (64 positions 55.3),
# 192 at 128x1204224 (64 positions 204); a copy takes 11.9, 39.3 and 146.
ELEMENTS, PER_THREAD = 8192, 32
FEWEST, MOST = 16, 32


def tile_for(channels: int) -> tuple[int, int]:
    """Positions and warps of a program with this many channels, a power of two."""
    positions = max(FEWEST, min(MOST, ELEMENTS // channels))
    return positions, max(1, channels * positions // (32 * PER_THREAD))


def plan(call: Call) -> TritonLaunch:
    x, out = call["x"], call["out"]
    if no := problem(x) or problem(out):
        raise Unsupported(no)
    batch, channels, *sizes = x.shape
    positions = math.prod(sizes)
    strides = [*_strides(x), *_strides(out)]
    group = math.gcd(16, positions, *strides)
    block = triton.next_power_of_2(channels)
    tile, warps = tile_for(block)
    tiles = triton.cdiv(positions, tile)
    modulation = [s for n in ("scale", "shift") for s in _strides(call[n])]
    return TritonLaunch(
        kernel=channel_norm_kernel,
        grid=(batch * tiles,),
        pointers=("x", "weight", "scale", "shift", "out"),
        scalars=(
            positions // group,
            tiles,
            *(s // group for s in strides),
            *modulation,
            float(call["eps"]),
        ),
        constants={
            "C": channels,
            "CHANNELS": block,
            "POSITIONS": tile,
            "GROUP": group,
            "ACT": call["activation"],
        },
        num_warps=warps,
        alignment=min(16, call.alignment),
    )


def _strides(t: Tensor | None) -> tuple[int, int]:
    """Strides of batch and channel; 0 for a dimension of size 1."""
    if t is None:
        return 0, 0
    batch, channel = (s if n > 1 else 0 for n, s in zip(t.shape[:2], t.stride()[:2], strict=True))
    return batch, channel
