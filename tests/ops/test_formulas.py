"""What the formulas mean: how modulation spreads, what RoPE rotates by, which half is activated."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from declared import OPS, every_op, full, small, tensors
from numerics import as_tuple

import kernelwright as kw
from kernelwright.backends.triton import interpreting
from kernelwright.ops.case import Inputs

every_backend = pytest.mark.parametrize(
    "backend", ["torch", *(["triton"] if interpreting() else [])]
)
PARTS = ("scale", "shift", "gate")
BATCH, FRAMES, TOKENS, WIDTH = 2, 3, 12, 64


def modulated(op):
    """The modulation that an op takes: the first tensor is what it modulates, and some case passes
    fewer values than that. A `gate` as large as the input in every case is another operand."""
    return [n for n in PARTS if any(map(functools.partial(_spreads, n), small(op)))]


def _spreads(name, case):
    first, *given = tensors(case.arguments(Inputs(torch.float32))).items()
    return any(n == name and t.shape != first[1].shape for n, t in given)


def spread(how, values):
    """values [B, 1, D] as `how` hands them over."""
    forms = {
        "[B, D]": lambda: values[:, 0],
        "[B, 1, D]": lambda: values,
        "[B, S, D]": lambda: values.expand(-1, TOKENS, -1),
        "[B, S, D] in memory": lambda: values.repeat(1, TOKENS, 1),
        "[B, F, 1, D]": lambda: values.unsqueeze(1).expand(-1, FRAMES, -1, -1),
        "a chunk": lambda: values.repeat(1, 1, 3).chunk(3, dim=-1)[1],
        "an unbound view": lambda: torch.stack((values, values), 2).unbind(2)[1],
    }
    return forms[how]()


@every_backend
@every_op([op for op in OPS if modulated(op)])
def test_every_form_of_a_modulation_says_the_same(op, backend):
    arguments = full(op).arguments(Inputs(torch.float32))
    rows = next(iter(tensors(arguments).values())).shape
    inputs = Inputs(torch.float32)
    for n, t in tensors(arguments).items():
        arguments[n] = (
            inputs.normal(BATCH, TOKENS, WIDTH) if t.shape == rows else inputs.weight(WIDTH)
        )
    values = {n: inputs.normal(BATCH, 1, WIDTH) for n in modulated(op)}

    def call(how):
        return as_tuple(
            op.call(arguments | {n: spread(how, v) for n, v in values.items()}, backend=backend)
        )

    expected = call("[B, S, D] in memory")
    for how in ("[B, D]", "[B, 1, D]", "[B, S, D]", "[B, F, 1, D]", "a chunk", "an unbound view"):
        assert all(map(torch.equal, call(how), expected)), how
    values = {n: v[:1].expand(BATCH, -1, -1) for n, v in values.items()}
    one = {n: v[0, 0] for n, v in values.items()}
    flat = as_tuple(op.call(arguments | one, backend=backend))
    assert all(map(torch.equal, flat, call("[B, S, D] in memory"))), "[D]"


@every_backend
def test_frames_modulate_their_own_tokens(backend):
    x, scale = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, FRAMES, 1, WIDTH)
    got = kw.modulate(x, scale, None, backend=backend)
    each = x.unflatten(1, (FRAMES, -1))
    assert torch.equal(got, (each * (1 + scale)).flatten(1, 2))


@every_backend
def test_rope_1d_rotates_pair_j_of_token_s_by_s_theta_to_the_minus_2j_over_d(backend):
    tokens, dim, theta = 5, 8, 100.0
    x = torch.zeros(1, tokens, 1, dim)
    x[..., 0::2] = 1
    query, key = kw.rope_1d(x, x, theta, backend=backend)
    for s in range(tokens):
        for j in range(dim // 2):
            angle = s * theta ** (-2 * j / dim)
            turned = torch.tensor([math.cos(angle), math.sin(angle)])
            # the table is rounded to float32, times one and zero
            torch.testing.assert_close(
                query[0, s, 0, 2 * j : 2 * j + 2], turned, rtol=0, atol=2**-24
            )
    assert torch.equal(query, key)


@every_backend
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rope_3d_splits_a_head_into_time_height_and_width(layout, backend):
    """64 = 24 + 20 + 20: each share is rope_1d over its own axis."""
    frames, height, width, dim = 2, 3, 4, 64
    x = torch.randn(1, frames * height * width, 2, dim)
    got, _ = kw.rope_3d(x, x, frames, height, width, layout=layout, backend=backend)
    cos, sin = (torch.empty(frames, height, width, dim // 2, dtype=torch.float64) for _ in "cs")
    start = 0
    for axis, (share, count) in enumerate(((24, frames), (20, height), (20, width))):
        shape = [1, 1, 1, -1]
        shape[axis] = count
        power = torch.arange(0, share, 2, dtype=torch.float64) / share
        angle = torch.outer(torch.arange(count, dtype=torch.float64), 1e4**-power).view(shape)
        cos[..., start : start + share // 2] = angle.cos()
        sin[..., start : start + share // 2] = angle.sin()
        start += share // 2
    assert start == dim // 2
    expected = kw.apply_rope(x.double(), cos.flatten(0, 2), sin.flatten(0, 2), layout)
    # a cos + b sin with both tables, both products and the sum rounded: 2, 2 and 2 half ulps
    bound = 6 * 2**-25 * 2**0.5 * x.abs().max().item()
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=bound)


def test_rope_3d_is_rope_3d_extended_with_those_shares():
    x = torch.randn(1, 24, 2, 64)
    got = kw.rope_3d(x, x, 2, 3, 4)
    assert all(map(torch.equal, got, kw.rope_3d_extended(x, x, 2, 3, 4, 24, 20, 20)))


@pytest.mark.parametrize("dim", range(2, 258, 2))
def test_every_even_head_splits_into_even_shares(dim):
    from kernelwright.ops.rope.tables import split

    shares = split(dim)
    assert sum(shares) == dim
    assert all(n % 2 == 0 and n >= 0 for n in shares)
    assert shares[1] == shares[2] <= shares[0] <= shares[1] + 6


@every_backend
def test_rope_returns_new_tensors_and_writes_in_place_on_request(backend):
    query, key = torch.randn(2, 1, 6, 2, 64).unbind()
    before = query.clone(), key.clone()
    fresh = kw.rope_1d(query, key, backend=backend)
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])
    changed = kw.rope_1d(query, key, inplace=True, backend=backend)
    assert changed[0] is query
    assert changed[1] is key
    assert all(map(torch.equal, changed, fresh))


def test_geglu_activates_the_second_half_and_swiglu_the_first():
    packed = torch.randn(3, 64)
    first, second = packed.chunk(2, dim=-1)
    for approximate, name in ((True, "tanh"), (False, "none")):
        got = kw.geglu(packed, approximate=approximate)
        assert torch.equal(got, first * F.gelu(second, approximate=name))
        other = kw.geglu(packed, approximate=approximate, gate="first")
        assert torch.equal(other, second * F.gelu(first, approximate=name))
    assert torch.equal(kw.swiglu(packed), F.silu(first) * second)
    assert torch.equal(kw.swiglu(packed, gate="second"), F.silu(second) * first)
    assert torch.equal(kw.silu_mul(first, second), F.silu(first) * second)


def test_adaln_zero_gates_what_adaln_rmsnorm_gives():
    x = torch.randn(2, 6, 64)
    weight, scale, shift, gate = torch.randn(4, 64).unbind()
    plain = kw.adaln_rmsnorm(x, weight, scale, shift)
    assert torch.equal(kw.adaln_zero(x, weight, scale, shift, gate), plain * gate)
