"""Attention to few keys: the kernel whose programs hold all keys of a head."""

import math

import pytest
import torch
from attended import FEW_KEYS, KEY_MASKS, LOWEST, hold, key_mask, plans, tensors

from kernelwright.backends import Target
from kernelwright.backends.triton import interpreting
from kernelwright.ops import attention
from kernelwright.ops.attention import custom_kernels, launch, tiles
from kernelwright.ops.plan import Call

pytestmark = pytest.mark.usefixtures("rounding_interpreter")
interpreted = pytest.mark.skipif(not interpreting(), reason="a GPU is here: tests/gpu runs kernels")
quiet = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture
def planned():
    with plans() as seen:
        yield seen


def run(planned, *args, **how):
    got = attention(*args, backend="triton", **how)
    assert planned == ["attention_few_keys_kernel"]
    planned.clear()
    return got


@interpreted
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", FEW_KEYS)
def test_few_keys_of_any_shape(planned, shape, dtype):
    args = tensors(*FEW_KEYS[shape], dtype=dtype)
    hold(run(planned, *args), *args)


@quiet
@interpreted
@pytest.mark.parametrize("kind", ["bool", "bias", "-10000", "-inf", "lowest"])
@pytest.mark.parametrize("shape", KEY_MASKS)
def test_masks_that_are_the_same_for_every_query(planned, shape, kind):
    args = tensors(3, 2, 2, 33, 20, 16, dtype=torch.float16)
    mask = key_mask(kind, KEY_MASKS[shape](3, 2, 20), torch.float16)
    hold(run(planned, *args, mask), *args, mask)


@interpreted
def test_a_mask_that_repeats_its_row(planned):
    args = tensors(2, 2, 2, 33, 20, 16, dtype=torch.float16)
    mask = key_mask("bool", (2, 1, 1, 20), None).expand(2, 2, 33, 20)
    hold(run(planned, *args, mask), *args, mask)


@interpreted
@pytest.mark.parametrize("programs", [1, 2, 3])
def test_every_block_of_rows_is_walked_over(planned, monkeypatch, programs):
    """70 rows in blocks of 16, dealt out to programs."""
    monkeypatch.setattr(tiles, "FEW_KEYS_WALK", tiles.Walk(16, 4, 3, 1))
    monkeypatch.setattr(tiles, "programs_a_head", lambda *_: programs)
    args = tensors(2, 2, 2, 70, 20, 16, dtype=torch.float16)
    mask = key_mask("bias", (2, 1, 1, 20), torch.float16)
    hold(run(planned, *args, mask), *args, mask)


@quiet
@interpreted
@pytest.mark.parametrize("kind", ["bool", "-inf"])
def test_a_batch_that_sees_no_key_gives_zeros(planned, kind):
    args = tensors(2, 1, 1, 33, 20, 16, dtype=torch.float16)
    mask = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    mask[1] = False
    if kind == "-inf":
        mask = torch.zeros(2, 1, 1, 20).masked_fill(~mask, -math.inf)
    got = run(planned, *args, mask)
    assert got[1].count_nonzero() == 0
    hold(got, *args, mask)


@quiet
@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_keys_hidden_by_the_lowest_number_alone_give_the_mean(planned, dtype):
    query, key, value = tensors(2, 1, 1, 33, 20, 16, dtype=torch.bfloat16)
    mask = torch.zeros(2, 1, 1, 20, dtype=dtype)
    mask[0] = torch.finfo(dtype).min
    mask[1, ..., 5:] = torch.finfo(dtype).min
    got = run(planned, query, key, value, mask)
    mean = value[0].double().mean(1, keepdim=True).expand_as(value[0, :, :1]).bfloat16()
    torch.testing.assert_close(got[0], mean.expand_as(got[0]), rtol=2**-8, atol=2**-11)
    hold(got[1:], query[1:], key[1:], value[1:], mask[1:])


@quiet
@interpreted
def test_a_nan_in_the_mask_is_not_lost(planned):
    args = tensors(2, 1, 1, 17, 20, 16, dtype=torch.float16)
    mask = torch.zeros(2, 1, 1, 20)
    mask[1, ..., 3] = math.nan
    got = run(planned, *args, mask)
    assert got[1].isnan().all()
    assert not got[0].isnan().any()


@quiet
@interpreted
def test_a_bad_query_stays_in_its_row(planned):
    query, key, value = tensors(1, 1, 1, 33, 20, 16, dtype=torch.float16)
    clean = run(planned, query, key, value)
    query[0, 0, 4] = math.nan
    got = attention(query, key, value, backend="triton")
    assert got[0, 0, 4].isnan().all()
    got[0, 0, 4] = clean[0, 0, 4]
    assert torch.equal(got, clean)


@interpreted
@pytest.mark.parametrize("scale", [0.0, -0.5, 30.0])
def test_any_scale(planned, scale):
    args = tensors(1, 1, 1, 33, 16, 16, dtype=torch.float16)
    hold(run(planned, *args, scale=scale), *args, scale=scale)


@interpreted
def test_tensors_are_read_where_they_lie(planned):
    packed = torch.randn(2, 20, 3, 2, 24, generator=torch.Generator().manual_seed(0)).half()
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    shifted = torch.zeros(q.numel() + 3).half()[3:].view(q.shape).copy_(q)
    expected = run(planned, *(t.contiguous() for t in (q, k, v)))
    one = (q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1))
    for args in ((q, k, v), (shifted, k, v)):
        assert torch.equal(run(planned, *args), expected)
    assert torch.equal(run(planned, *one)[:1], expected[:1])


def plan(query, key, mask=None, causal=False, capability=(9, 0)):
    values = {"query": query, "key": key, "value": key, "mask": mask, "causal": causal}
    values |= {"scale": None, "out": custom_kernels.allocate(query, key, key)}
    target = Target(capability, 132)
    return launch.plan(Call(values, op="attention", exact=None, target=target))


def ltx(tokens, dtype=torch.bfloat16, dim=64):
    """A view of [2, tokens, 2048], heads first."""
    return torch.empty(2, tokens, 32, dim, dtype=dtype, device="meta").transpose(1, 2)


def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_ltx_takes_the_kernel_for_few_keys_in_one_wave():
    for mask in (empty(2, 1, 1, 128), None):
        found = plan(ltx(2688), ltx(128), mask)
        assert found.kernel.__name__ == "attention_few_keys_kernel"
        assert found.grid[::2] == (32, 2)
        assert math.prod(found.grid) <= 132 * tiles.FEW_KEYS_WALK.resident
        assert found.constants["BIAS"] is (mask is not None)


OTHERS = {
    "a mask by row": (ltx(2688), ltx(128), empty(2, 1, 2688, 128)),
    "many keys": (ltx(2688), ltx(129)),
    "wide heads": (ltx(2688, dim=72), ltx(128, dim=72)),
    "float32": (ltx(2688, torch.float32), ltx(128, torch.float32)),
    "few queries": (ltx(16), ltx(128)),
    "causal": (ltx(2688), ltx(128), None, True),
    "ampere": (ltx(2688), ltx(128), None, False, (8, 0)),
    "many batches": (empty(2**16, 1, 40, 64), empty(2**16, 1, 16, 64)),
    "far rows": (empty(0).as_strided((1, 1, 40, 64), (1, 1, 2**30, 1)), ltx(128)[:1, :1]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_take_the_kernel_for_any_keys(name):
    assert plan(*OTHERS[name]).kernel.__name__ == "attention_kernel"


@pytest.mark.parametrize("resident", [1, 3, 9])
def test_programs_share_the_rows_and_fill_the_gpu(resident):
    for heads in (1, 20, 64, 250, 1000):
        for blocks in (1, 7, 42, 126, 2**24):
            slots = resident * 132
            programs = tiles.programs_a_head(blocks, heads, slots)
            assert 1 <= programs <= blocks
            steps = -(-heads * programs // slots) * -(-blocks // programs)
            even = heads * blocks / slots
            assert steps <= 2 + 1.5 * even


def test_the_lowest_number_is_that_of_float32():
    few_keys = pytest.importorskip("kernelwright.ops.attention.few_keys")
    assert few_keys.LOWEST.value == LOWEST
