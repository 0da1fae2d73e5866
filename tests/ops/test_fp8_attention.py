"""Attention in eight bits, held to the reference and to attention in float32."""

import re

import pytest
import torch
import torch.nn.functional as F
from everything import share

from kernelwright.backends import Target, Unsupported, cuda
from kernelwright.checking import emulator
from kernelwright.inject.verify import accuracy
from kernelwright.ops.fp8_attention import FP8_ATTENTION, QUANTIZE_KV, fp8_attention, reference
from kernelwright.ops.fp8_attention import cuda as launches
from kernelwright.ops.plan import Call


def heads(tokens, dim=64, batch=1, count=2, mean=0.0, seed=0):
    """[batch, heads, tokens, dim] as views of a packed projection, keys with a shared mean."""
    own = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, 3, count, dim, generator=own)
    x[:, :, 1] += mean * torch.randn(count, dim, generator=own)
    return [t.transpose(1, 2) for t in x.bfloat16().unbind(2)]


# three bits of mantissa leave 2.6% in values and probabilities, 3.7% in their product; int8 leaves
# 0.9% in query and key; powers of two on straight lines leave 1.9%
MOST = 0.047


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tokens", [128, 300])
def test_the_error_is_that_of_eight_bits(tokens, dim):
    query, key, value = heads(tokens, dim, mean=2.0)
    expected = F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    result = fp8_attention(query, key, value)
    assert result.shape == expected.shape
    assert result.dtype == query.dtype
    assert result.transpose(1, 2).is_contiguous()
    assert 0.02 < accuracy.error(result, expected) <= MOST


def test_values_of_very_different_size_keep_their_error():
    """Scales belong to tiles of keys: neither a loud tile nor a loud channel costs the others."""
    query, key, value = heads(512, mean=2.0)
    value = value.clone()
    value[:, :, 128:256] *= 50
    value[..., :8] /= 100
    expected = F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    result = fp8_attention(query, key, value)
    assert accuracy.error(result, expected) <= MOST
    assert accuracy.error(result[..., :8], expected[..., :8]) <= MOST


@pytest.mark.parametrize("keys", [1, 128, 300])
def test_keys_that_are_all_alike_leave_the_error_of_the_values_alone(keys):
    """Then all probabilities are one number, and its rounding would be an error of all results."""
    query, key, value = heads(keys, mean=2.0)
    key, value = key[:, :, :1].expand_as(key).contiguous(), value + 3
    expected = F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    assert accuracy.error(fp8_attention(query, key, value), expected) < (
        0.03 if keys == 1 else 0.006
    )


def test_the_mean_of_the_keys_costs_nothing():
    query, key, value = heads(256, mean=0.0)
    shifted = (key.float() + 8.0).to(torch.float32)
    plain = fp8_attention(query.float(), key.float(), value.float())
    result = fp8_attention(query.float(), shifted, value.float())
    torch.testing.assert_close(result, plain, rtol=0.02, atol=0.01)


def test_tiles_and_orders_are_undone():
    t = torch.arange(2 * 128 * 64).reshape(2, 128, 64)
    assert torch.equal(reference.of_tiles(reference.as_tiles(t), 128), t)
    assert torch.equal(reference.in_order_of_keys(reference.in_kernel_order(t)), t)
    tile = reference.as_tiles(t)[0]
    # 16 bytes of a row, then those of the next row; after 8 rows the next 16 bytes
    assert tile[:16].tolist() == t[0, 0, :16].tolist()
    assert tile[16:32].tolist() == t[0, 1, :16].tolist()
    assert tile[128:144].tolist() == t[0, 0, 16:32].tolist()
    assert tile[8 * 64 : 8 * 64 + 16].tolist() == t[0, 8, :16].tolist()


def test_padded_keys_take_no_part():
    query, key, value = heads(130)
    whole = fp8_attention(query, key, value)
    value = torch.cat([value, torch.full_like(value[:, :, :1], 100.0)], 2)[:, :, :130]
    assert torch.equal(fp8_attention(query, key, value), whole)
    assert whole.isfinite().all()


def test_wrong_shapes_are_named():
    query, key, value = heads(32)
    with pytest.raises(ValueError, match="fp8_attention: batch and heads differ"):
        fp8_attention(query[:, :1], key, value)
    with pytest.raises(ValueError, match=r"key has shape .* dim one of \(64, 128\)"):
        fp8_attention(query, key[..., :32], value)


needs_emulator = pytest.mark.skipif(emulator.problem() is not None, reason="no g++")
EMULATORS = {}  # by code: g++ compiles a kernel for longer than most tests run it


def run_emulated(op, *operands):
    """What an op's CUDA kernel computes."""
    arguments = dict(zip(op.arguments, operands, strict=True))
    launch, _ = emulator.planned(op, arguments)
    if launch.code not in EMULATORS:
        EMULATORS[launch.code] = emulator.Emulator([launch])
    return emulator.emulated(EMULATORS[launch.code], op, arguments)


def emulated(query, key, value):
    """What the CUDA kernel computes, beside the reference."""
    eight = QUANTIZE_KV(key, value, backend="torch")
    operands = query, *eight, key.shape[2], query.shape[3] ** -0.5
    (got,) = run_emulated(FP8_ATTENTION, *operands)
    return got, FP8_ATTENTION(*operands, backend="torch")


@needs_emulator
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("keys", "dtype"), [(200, torch.bfloat16), (128, torch.float16), (1, torch.bfloat16)]
)
def test_the_kernel_before_it_computes_what_the_reference_does(keys, dtype, dim):
    _, key, value = (t.to(dtype) for t in heads(keys, dim, batch=2, mean=2.0))
    got, wanted = run_emulated(QUANTIZE_KV, key, value), QUANTIZE_KV(key, value, backend="torch")
    # a mean that is added up in another order moves a few keys to the other side of a tie
    assert (got[0] != wanted[0]).float().mean() < 0.001
    assert torch.equal(got[1].view(torch.uint8), wanted[1].view(torch.uint8))
    torch.testing.assert_close(got[2], wanted[2], rtol=1e-5, atol=1e-6)


@needs_emulator
@pytest.mark.parametrize("shift", [4, 1])
def test_keys_and_values_that_are_not_aligned_are_read_or_refused(shift):
    _, key, value = heads(140)
    wanted = QUANTIZE_KV(key, value, backend="torch")
    memory = torch.empty(key.numel() + 8, dtype=key.dtype)
    shifted = memory[shift:][: key.numel()].view(1, 2, 140, 64).copy_(key)
    if shift == 4:
        got = run_emulated(QUANTIZE_KV, shifted, value)
        assert (got[0] != wanted[0]).float().mean() < 0.001
    else:
        with pytest.raises(Unsupported, match="four at once"):
            run_emulated(QUANTIZE_KV, shifted, value)


@needs_emulator
@pytest.mark.parametrize(("queries", "keys"), [(70, 130), (200, 128), (5, 40)])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_kernel_computes_what_the_reference_does(queries, keys, dim):
    query = heads(queries, dim)[0]
    _, key, value = heads(keys, dim, mean=2.0)
    got, wanted = emulated(query, key, value)
    # the same integers, and probabilities rounded relative to powers of two
    assert accuracy.error(got, wanted) < 0.001


@needs_emulator
@pytest.mark.parametrize("dim", [64, 128])
def test_sums_go_on_when_the_maximum_rises(dim):
    """Over more tiles than one sum of the tensor cores takes, each with larger scores than those
    before it, and values that do not cancel."""
    query, key, value = heads(2200, dim, count=1)
    query, value = query[:, :, :16], value + 1
    key = (key.float() * torch.linspace(0.2, 3.0, 2200)[None, None, :, None]).to(key.dtype)
    got, wanted = emulated(query, key, value)
    assert accuracy.error(got, wanted) < 0.001


@needs_emulator
@pytest.mark.parametrize("dim", [64, 128])
def test_scores_may_lie_far_apart_or_be_alike(dim):
    """More octaves apart than floats have, within a tile and between tiles; or not at all."""
    # of a seed that has no probability on the border of two numbers of fp8, 12% apart
    query, key, value = heads(300, dim, count=3, seed=1)
    query = query[:, :, :24] * torch.tensor([0, 1e-6, 100.0]).repeat(8)[:, None].bfloat16()
    key = key.clone()
    for loud in range(3):  # a tile of a head
        key[:, loud, 128 * loud : 128 * (loud + 1)] *= 20
    got, wanted = emulated(query, key, value)
    assert got.isfinite().all()
    # thousands of octaves leave float32, in which the reference has them, a thousandth of one
    assert accuracy.error(got, wanted) < 0.002


@pytest.mark.skipif(cuda.nvrtc_version() is None, reason="no NVRTC")
@pytest.mark.parametrize("dim", [64, 128])
def test_the_kernel_compiles_without_spills(dim):
    queries = 4608
    x = torch.empty(1, 12, queries, dim, dtype=torch.bfloat16, device="meta")
    operands = x, *QUANTIZE_KV.allocate(x, x), queries, dim**-0.5
    (out,) = FP8_ATTENTION.allocate(*operands)
    arguments = dict(zip(FP8_ATTENTION.arguments, operands, strict=True))
    values = {**arguments, "out": out}
    call = Call(values, op="fp8_attention", exact=None, target=Target((9, 0), 132))
    launch = launches.plan_attention(call)
    _, said = cuda.build(launch.code, "sm_90a", verbose=True)
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "serialized" not in said  # products that wait for each other
    # registers that one part gives back are enough for what the others take
    started = int(re.search(r"Used (\d+) registers", said)[1])
    groups, registers = launches.SHAPES[dim]
    assert 24 + groups * registers <= (groups + 1) * started


@pytest.mark.parametrize("together", [True, False], ids=["heads of a token together", "apart"])
def test_the_result_lies_as_that_of_pytorch(together):
    """Otherwise a block that was recorded with PyTorch's attention copies it."""
    query, key, value = heads(300, 64, count=2)
    if not together:
        query = query.contiguous()
    operands = query, *QUANTIZE_KV(key, value), 300, 64**-0.5
    expected = F.scaled_dot_product_attention(query, key, value)
    assert FP8_ATTENTION(*operands).stride() == expected.stride()
    assert FP8_ATTENTION.allocate(*operands)[0].stride() == expected.stride()


NOT_FINITE = [(p, n) for n in (float("nan"), float("inf")) for p in ("query", "key", "value")]


@pytest.mark.parametrize(("place", "number"), share(NOT_FINITE, 2))
def test_what_is_not_finite_is_not_hidden(place, number):
    query, key, value = (t.clone() for t in heads(150))
    {"query": query, "key": key, "value": value}[place][0, 1, 140, 3] = number
    rows = slice(140, 141) if place == "query" else slice(None)
    results = [fp8_attention(query, key, value)]
    if emulator.problem() is None:
        results.append(emulated(query, key, value)[0])
    for result in results:
        assert result[0, 1, rows].isnan().all()
        assert result[0, 0].isfinite().all()


@needs_emulator
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_tiles_that_are_not_finite_have_such_a_scale(number):
    _, key, value = (t.clone() for t in heads(150))
    key[0, 1, 140, 3] = value[0, 0, 5, 7] = number
    for run in (run_emulated, lambda op, *given: op(*given, backend="torch")):
        scales = run(QUANTIZE_KV, key, value)[2]
        assert scales[..., 0].isfinite().tolist() == [[[True, True], [True, False]]]
        assert scales[..., 1].isfinite().tolist() == [[[False, True], [True, True]]]


def test_the_keys_of_the_mean_lie_all_over_them():
    own = torch.arange(4608.0)[None, None, :, None].expand(1, 1, 4608, 64)
    assert abs(reference.mean(own).mean() - 2303.5) < 100
    period = (torch.arange(4608) % 64).float()[None, None, :, None].expand(1, 1, 4608, 64)
    assert abs(reference.mean(period).mean() - 31.5) < 6


@pytest.mark.skipif(cuda.nvrtc_version() is None, reason="no NVRTC")
@pytest.mark.parametrize("dim", [64, 128])
def test_the_kernel_before_it_compiles_without_spills(dim):
    x = torch.empty(1, 12, 4608, dim, dtype=torch.bfloat16, device="meta")
    values = dict(
        zip(
            ("key", "value", *QUANTIZE_KV.outputs), (x, x, *QUANTIZE_KV.allocate(x, x)), strict=True
        )
    )
    call = Call(values, op="quantize_kv", exact=None, target=Target((9, 0), 132))
    launch = launches.plan_quantize(call)
    _, said = cuda.build(launch.code, "sm_90", verbose=True)
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    used = int(re.search(r"Used (\d+) registers", said)[1])
    assert used * launch.block * launch.resident <= 65536
