"""RMSNorm over channels with SiLU behind it: the kernel is held to float64."""

import math

import pytest
import torch
from channel_norms import EPS, LAYOUTS, eager, hold, normal, parts

from kernelwright.ops.channel_norm import CHANNEL_NORM
from kernelwright.ops.channel_norm.limits import MAX_CHANNELS, problem

pytestmark = pytest.mark.usefixtures("rounding_interpreter")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("channels", [8, 24, 128, 130])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_and_any_number_of_channels(layout, channels):
    x = LAYOUTS[layout](channels)
    hold(x)
    hold(x, *parts(x, weighted=True, modulation=True))


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("modulation", [False, True], ids=["plain", "modulated"])
@pytest.mark.parametrize("weighted", [False, True], ids=["bare", "weight"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_part_is_there_or_not(dtype, weighted, modulation, activation):
    x = normal(2, 24, 3, 5, 9, dtype=dtype)
    hold(x, *parts(x, weighted, modulation), activation)


def test_the_widest_is_held_and_nothing_wider():
    hold(normal(1, MAX_CHANNELS, 2, 9))
    wider = normal(1, MAX_CHANNELS + 1, 2, 9)
    with pytest.raises(ValueError, match=f"{MAX_CHANNELS + 1} channels"):
        hold(wider)


def test_positions_apart_in_memory_are_refused_by_name():
    x = normal(1, 8, 4, 6, 8)[..., :5]
    assert problem(x) == "the positions of a channel do not lie side by side in memory"
    with pytest.raises(ValueError, match="do not lie side by side"):
        hold(x)
    assert problem(x.contiguous()) is None
    assert problem(x.contiguous(memory_format=torch.channels_last_3d)) is not None


def test_what_is_no_number_stays_at_its_position():
    x = normal(1, 24, 5, 7)
    clean = hold(x)
    x[0, 3, 2, 4] = math.nan
    got = CHANNEL_NORM(x, None, None, None, "silu", EPS, backend="triton")
    assert got[..., 2, 4].isnan().all()
    got[..., 2, 4] = clean[..., 2, 4]
    assert torch.equal(got, clean)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weight": torch.ones(7)}, "weight has 7 elements, x has width 8"),
        ({"scale": torch.ones(2, 8)}, r"scale has shape \[2, 8\], expected \[2, 8, 1\]"),
        ({"shift": torch.ones(3, 8, 1)}, r"shift has shape \[3, 8, 1\]"),
        ({"activation": "gelu"}, "activation is 'gelu'"),
        ({"x": torch.ones(2, 8)}, "x has 2 dimensions"),
    ],
)
def test_a_wrong_argument_is_named(wrong, message):
    right = {"x": torch.ones(2, 8, 3), "weight": None, "scale": None, "shift": None}
    with pytest.raises(ValueError, match=f"channel_norm: {message}"):
        CHANNEL_NORM.call({**right, "activation": "silu", "eps": EPS, **wrong})


def test_the_library_op_keeps_its_schema():
    x = normal(2, 8, 3, 5, dtype=torch.float32)[:, :, 1:]
    operands = [t.detach().requires_grad_() for t in (x, *parts(x, True, True))]
    torch.library.opcheck(CHANNEL_NORM.library_op, (*operands, "silu", EPS))


def test_its_gradient_is_that_of_eager():
    x = normal(2, 8, 3, 5, dtype=torch.float64)
    operands = [t.detach().requires_grad_() for t in (x, *parts(x, True, True))]
    given = torch.randn_like(x)
    got = torch.autograd.grad(CHANNEL_NORM(*operands, "silu", EPS), operands, given)
    expected = torch.autograd.grad(eager(*operands, "silu"), operands, given)
    for mine, theirs in zip(got, expected, strict=True):
        # eager takes its mean in float32
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
