"""Attention that keeps all scores in memory: its kernel, emulated, against PyTorch's ops."""

import ctypes
import ctypes.util
import itertools

import pytest
import torch
import torch.nn.functional as F
from everything import share
from transformers import FalconConfig, FalconForCausalLM

import kernelwright as kw
from inject.harness import check_exact, fused_sites, run, same
from kernelwright.backends.cuda import compile_cubin
from kernelwright.checking import emulator
from kernelwright.inject.fusions import all_scores
from kernelwright.inject.fusions import attention as fusions


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def masks(batch, heads, queries, keys):
    """Masks by name, each broadcastable to [batch, heads, queries, keys]."""
    seen = drawn(batch, heads, queries, keys, seed=1) > 0
    causal = torch.ones(queries, keys, dtype=torch.bool).tril()[None, None]
    return {
        "causal": causal,
        "each": seen,
        "of heads": seen[:1],
        "of samples": seen[:, :1],
        "of keys": seen[:1, :1, :1],
        "expanded": seen[:, :1].expand(batch, heads, queries, keys),
        "a row sees nothing": causal.tril(-1),
        "numbers": drawn(batch, 1, queries, keys, seed=2).bfloat16(),
        "minus infinity": torch.where(seen[:, :1], 0.0, -torch.inf).half(),
    }


def steps(mask):
    return tuple(mask.stride(d) if mask.shape[d] > 1 else 0 for d in range(3))


LENGTHS = (all_scores.MIN_KEYS, 1030, 1500, 2048, 4097, 9215, all_scores.MAX_KEYS)


@pytest.fixture(scope="module")
def emulated():
    """The kernel for the lengths of rows and the masks of the tests here, compiled at once."""
    if (why := emulator.problem()) is not None:
        pytest.skip(why)
    launches = [
        all_scores.launch_of(dtype, (1, 1, 1, keys), (0, 0, 0))
        for dtype in all_scores.MASKS
        for keys in LENGTHS
    ]
    kernels = emulator.Emulator({launch.code: launch for launch in launches}.values())

    def run(scores, mask):
        launch = all_scores.launch_of(mask.dtype, tuple(scores.shape), steps(mask))
        values = {"scores": scores.clone(), "mask": mask}
        kernels.run(launch, values, ["scores"])
        return values["scores"]

    return run


def by_pytorch(scores, mask):
    numbers = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask
    return torch.ops.aten._safe_softmax(scores + numbers, -1)


@pytest.mark.parametrize("keys", [1030, 2048])
@pytest.mark.parametrize("name", masks(1, 1, 1, 1))
def test_the_kernel_adds_any_mask(name, keys, emulated):
    shape = 2, 2, 3, keys
    scores, mask = 3 * drawn(*shape), masks(*shape)[name]
    torch.testing.assert_close(emulated(scores, mask), by_pytorch(scores, mask))


@pytest.mark.parametrize("keys", LENGTHS)
def test_the_kernel_takes_rows_of_any_length(keys, emulated):
    scores, mask = 3 * drawn(1, 1, 2, keys), masks(1, 1, 2, keys)["each"]
    torch.testing.assert_close(emulated(scores, mask), by_pytorch(scores, mask))


def exponentials(x):
    """By the function that the emulated kernel calls; PyTorch has one of its own."""
    exp = ctypes.CDLL(ctypes.util.find_library("m")).expf
    exp.argtypes, exp.restype = [ctypes.c_float], ctypes.c_float
    return torch.tensor(list(map(exp, x.flatten().tolist()))).view(x.shape)


def test_it_has_the_bits_of_sums_in_pytorchs_order_and_of_a_division(emulated):
    scores = torch.full((16, 2048), -torch.inf)
    for row in range(16):
        scores[row, : 3 + row] = 0.0
        scores[row, 1024:] = -drawn(1024, seed=row).abs() * (20 + 6 * row)
    got = emulated(scores.view(1, 1, 16, 2048), torch.ones(1, 1, 1, 2048, dtype=torch.bool))
    terms = exponentials(scores)
    sums = (terms[:, :1024] + terms[:, 1024:]).view(16, 32, 32)
    for _ in range(2):  # of the threads of a warp, then of the warps
        for step in (16, 8, 4, 2, 1):
            sums = sums[..., :step] + sums[..., step : 2 * step]
        sums = sums.squeeze(-1)
    assert torch.equal(got[0, 0], terms / sums[:, None])
    assert got.count_nonzero() > (got > 2**-96).sum() > 1000  # both ways to divide


@pytest.mark.parametrize("keys", [1500, 1501])
def test_numbers_that_are_none_are_as_in_pytorch(keys, emulated):
    scores, mask = drawn(1, 1, 6, keys), torch.ones(1, 1, 6, keys, dtype=torch.bool)
    mask[..., 700:] = False
    scores[0, 0, 0, 3] = torch.nan
    scores[0, 0, 1, 900] = torch.nan  # hidden by the mask
    scores[0, 0, 2, 900] = torch.inf  # the same
    scores[0, 0, 3, 4] = torch.inf
    scores[0, 0, 4] = -torch.inf
    scores[0, 0, 5, :1000] = -torch.inf
    got, expected = emulated(scores, mask), by_pytorch(scores, mask)
    assert torch.equal(got.isnan(), expected.isnan())
    torch.testing.assert_close(got.nan_to_num(), expected.nan_to_num())


WAYS = itertools.product(
    (all_scores.MIN_KEYS, all_scores.MAX_KEYS), all_scores.MASKS, ("sm_75", "sm_80", "sm_90")
)


@pytest.mark.parametrize(("keys", "mask", "arch"), share(WAYS, 5))
def test_the_kernel_compiles(keys, mask, arch):
    launch = all_scores.launch_of(mask, (1, 2, 3, keys), (0, 0, keys))
    assert compile_cubin(launch.code, arch)


def test_between_gemms_it_is_pytorchs_math_kernel(monkeypatch):
    monkeypatch.setattr(all_scores, "probabilities", by_pytorch)
    query = drawn(2, 6, 17, 8).bfloat16()
    key, value = (drawn(2, 1, 17, 8, seed=s).bfloat16() for s in (1, 2))
    mask = masks(2, 6, 17, 17)["causal"]
    expected = F.scaled_dot_product_attention(query, key, value, mask)
    math_kernel = torch.ops.aten._scaled_dot_product_attention_math
    numbers = torch.where(mask, 0.0, -torch.inf).bfloat16()
    assert torch.equal(math_kernel(query, key, value, numbers)[0], expected)
    assert torch.equal(all_scores.attend(query, key, value, mask), expected)


def falcon(**config):
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2}
    made = FalconConfig(**sizes, num_attention_heads=4, alibi=False, **config)
    return FalconForCausalLM(made).to(torch.bfloat16).eval().requires_grad_(False)


SEVEN = {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False}
WORDS = {"input_ids": torch.arange(14).view(2, 7) * 5 % 128, "use_cache": False}


@pytest.fixture
def kernel(monkeypatch):
    """PyTorch's ops in place of the kernel: what is tested is all around."""
    ran = []

    def probabilities(scores, mask):
        ran.append(tuple(scores.shape))
        return by_pytorch(scores, mask)

    monkeypatch.setattr(all_scores, "MIN_QUERIES", 1)
    monkeypatch.setattr(all_scores, "probabilities", probabilities)
    monkeypatch.setattr(all_scores, "why_not", lambda *given: None)
    return ran


def test_falcon_has_eagers_bits_by_it(kernel):
    report = check_exact(falcon(**SEVEN), WORDS)
    assert fused_sites(report)["attention with all scores"] == 2
    assert set(kernel) == {(2, 4, 7, 7)}


def test_heads_with_keys_of_their_own_keep_pytorchs_kernel(kernel):
    report = check_exact(falcon(**SEVEN | {"multi_query": False}), WORDS)
    assert "attention with all scores" not in fused_sites(report)
    assert kernel == []


def test_other_bits_are_not_used(kernel, monkeypatch):
    def wrong(scores, mask):
        return by_pytorch(scores, mask) * (1 + 2**-7)

    model = falcon(**SEVEN)
    expected = run(model, WORDS)
    monkeypatch.setattr(all_scores, "probabilities", wrong)
    with kw.injected(model) as report:
        with pytest.warns(UserWarning, match="attention with all scores"):
            first = run(model, WORDS)
        assert same(first, expected)
        assert same(run(model, WORDS), expected)
    assert report.problems


@pytest.mark.parametrize("how", ["autocast", "gradients", "patched", "few"])
def test_what_pytorch_would_do_otherwise_runs_eager(how, kernel, monkeypatch):
    model = falcon(**SEVEN)
    if how == "patched":
        usual = F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: usual(*a, **k))
    if how == "gradients":
        model.requires_grad_()
    if how == "few":
        monkeypatch.setattr(all_scores, "MIN_QUERIES", 8)

    def ran():
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return model(**WORDS).logits.detach()

    expected = ran()
    with kw.injected(model):
        assert torch.equal(ran(), expected)
        assert torch.equal(ran(), expected)
    assert kernel == []


def test_masks_and_rows_without_a_kernel_are_named():
    query, mask = torch.empty(1, 2, 7, 8), torch.empty(1, 1, 7, 7)
    assert fusions.all_scores.why_not(query, query, query, mask) == "on cpu"
