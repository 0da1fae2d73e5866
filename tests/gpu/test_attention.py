"""Our attention kernels, called by name: right for any keys, and for few keys in one tile."""

import pytest
import torch
from attended import FEW_KEYS, KEY_MASKS, hold, key_mask, plans, tensors
from declared import DTYPES, every_case
from numerics import hold_case

from kernelwright.ops import attention
from kernelwright.ops.attention import choice, sdpa
from kernelwright.ops.op import registry

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture
def planned():
    with plans() as seen:
        yield seen


def ltx(tokens, masked, seed=0):
    """LTX-Video's cross-attention: views of [2, tokens, 2048], and bias over padding."""
    generator = torch.Generator("cuda").manual_seed(seed)
    how = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    args = [torch.randn(2, n, 32, 64, **how).transpose(1, 2) for n in (tokens, 128, 128)]
    if not masked:
        return [*args, None]
    mask = torch.zeros(2, 1, 1, 128, device="cuda", dtype=torch.bfloat16)
    mask[0, ..., 40:] = mask[1, ..., 90:] = -10000.0
    return [*args, mask]


@pytest.mark.parametrize("dtype", DTYPES)
@every_case([registry()["attention"]])
def test_triton_is_as_close_to_float64_as_eager(op, case, dtype):
    hold_case(op, case, dtype, lambda a: op.call(a, backend="triton"), "cuda")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", FEW_KEYS)
def test_few_keys_of_any_shape(planned, shape, dtype):
    args = tensors(*FEW_KEYS[shape], dtype=dtype, device="cuda")
    hold(attention(*args, backend="triton"), *args, eager="math")
    assert planned == ["attention_few_keys_kernel"]


@pytest.mark.parametrize("kind", ["bool", "bias", "-10000", "-inf", "lowest"])
@pytest.mark.parametrize("shape", KEY_MASKS)
def test_masks_that_are_the_same_for_every_query(planned, shape, kind):
    args = tensors(3, 2, 2, 130, 77, 64, dtype=torch.bfloat16, device="cuda")
    mask = key_mask(kind, KEY_MASKS[shape](3, 2, 77), torch.bfloat16).cuda()
    hold(attention(*args, mask, backend="triton"), *args, mask, eager="math")
    assert planned == ["attention_few_keys_kernel"]


def test_a_batch_that_sees_no_key_gives_zeros(planned):
    args = tensors(2, 2, 2, 130, 128, 64, dtype=torch.bfloat16, device="cuda")
    mask = torch.ones(2, 1, 1, 128, dtype=torch.bool, device="cuda")
    mask[1] = False
    got = attention(*args, mask, backend="triton")
    assert got[1].count_nonzero() == 0
    hold(got, *args, mask, eager="math")


def test_keys_hidden_by_the_lowest_number_alone_give_the_mean(planned):
    query, key, value = tensors(1, 2, 2, 130, 128, 64, dtype=torch.bfloat16, device="cuda")
    mask = torch.full((1, 1, 1, 128), torch.finfo(torch.bfloat16).min, device="cuda")
    got = attention(query, key, value, mask.bfloat16(), backend="triton")
    mean = value.double().mean(2, keepdim=True).bfloat16()
    torch.testing.assert_close(got, mean.expand_as(got), rtol=2**-8, atol=2**-11)


def test_misaligned_tensors_are_read_right(planned):
    query, key, value = tensors(2, 2, 2, 130, 77, 64, dtype=torch.bfloat16, device="cuda")
    expected = attention(query, key, value, backend="triton")
    for offset in (1, 2, 4):
        flat = torch.zeros(query.numel() + offset, dtype=query.dtype, device="cuda")
        moved = flat[offset:].view(query.shape).copy_(query)
        assert torch.equal(attention(moved, key, value, backend="triton"), expected)
    assert planned == ["attention_few_keys_kernel"] * 4


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "plain"])
@pytest.mark.parametrize("tokens", [1320, 2688])
def test_ltx_is_as_close_to_float32_as_cudnn(planned, tokens, masked):
    *args, mask = ltx(tokens, masked)
    wide = [None if t is None else t.float() for t in (*args, mask)]
    truth = sdpa.math(*wide, None, False)

    def error(got):
        return (got.float() - truth).norm() / truth.norm()

    got = attention(*args, mask, backend="triton")
    assert planned == ["attention_few_keys_kernel"]
    assert got.stride() == args[0].stride()
    assert error(got) <= 1.2 * error(sdpa.cudnn(*args, mask, None, False))


MASKS = {
    "plain": lambda tokens: None,
    "padded": lambda tokens: tokens.lt(len(tokens) - 9)[None, None, None],
    "causal": lambda tokens: tokens.le(tokens[:, None])[None, None],
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries", [130, 1024])
@pytest.mark.parametrize("head_dim", [136, 160, 192, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_wide_heads_are_as_close_to_float32_as_plain_steps(dtype, head_dim, queries, mask):
    """On Hopper cuDNN runs heads of up to 256, as PyTorch itself would choose it. It multiplies the
    values by weights of 16 bits, and so do the plain steps here."""
    query, key, value = tensors(2, 4, 2, queries, queries, head_dim, dtype=dtype, device="cuda")
    seen = MASKS[mask](torch.arange(queries, device="cuda"))
    chosen = choice.choose(choice.request_of(query, key, value, seen, False))
    if torch.cuda.get_device_capability() == (9, 0):
        assert chosen.backend == "cudnn", chosen.reason
    key, value = (t.repeat_interleave(2, 1) for t in (key, value))
    scores = query.double() @ key.double().mT * head_dim**-0.5
    weights = (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1)
    truth = weights @ value.double()

    def error(got):
        return (got.double() - truth).norm() / truth.norm()

    plain = (weights.to(dtype).double() @ value.double()).to(dtype)
    assert error(attention(query, key, value, seen)) <= 1.2 * error(plain)


def test_a_graph_of_it_gives_the_bits_of_a_call(planned):
    *args, mask = ltx(1320, masked=True)
    *other, _ = ltx(1320, masked=True, seed=1)
    expected = attention(*other, mask, backend="triton")
    attention(*args, mask, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention(*args, mask, backend="triton")
    for mine, new in zip(args, other, strict=True):
        mine.copy_(new)
    graph.replay()
    assert torch.equal(got, expected)
