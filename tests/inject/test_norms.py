"""Which modules are norms that the kernels support: found by running them, whatever their name."""

from importlib import import_module

import pytest
import torch
from torch import nn

import kernelwright as kw
from inject.harness import check_exact, fused_sites, same
from kernelwright.inject.identify.norm_kinds import Norm, describe

WIDTH = 64
MORE = "its forward takes more than the rows"
OTHER = "its output is not that of a plain RMSNorm or LayerNorm"
PLUS_ONE = "it multiplies by 1 + weight, not by weight"


def norm_of(family, name, *size, **config):
    """A norm of a family of transformers, with random weights."""
    module = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)
    made = module(*size, **config)
    for parameter in made.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return made


KNOWN = [
    ("llama", "LlamaRMSNorm", WIDTH),
    ("t5", "T5LayerNorm", WIDTH),
    ("phi3", "Phi3RMSNorm", WIDTH),
    ("llama4", "Llama4TextRMSNorm", WIDTH),
    ("llama4", "Llama4TextL2Norm"),
    ("nanochat", "NanoChatRMSNorm"),
]
UNKNOWN = [
    (("gemma", "GemmaRMSNorm", WIDTH), PLUS_ONE),
    (("gemma3", "Gemma3RMSNorm", WIDTH), PLUS_ONE),
    (("qwen3_next", "Qwen3NextRMSNorm", WIDTH), PLUS_ONE),
    (("qwen3_next", "Qwen3NextRMSNormGated", WIDTH), MORE),
    (("bamba", "BambaRMSNormGated", WIDTH), MORE),
    (("mamba2", "MambaRMSNormGated", WIDTH), MORE),
    (("nemotron", "NemotronLayerNorm1P", WIDTH), OTHER),
    (("cohere", "CohereLayerNorm", WIDTH), OTHER),
    (("olmo2", "Olmo2RMSNorm", WIDTH), OTHER),
    (("gpt_oss", "GptOssRMSNorm", WIDTH), OTHER),
    (("cohere", "CohereLayerNorm", (4, 16)), "a norm over more than the last dimension"),
    (("olmo", "OlmoLayerNorm", WIDTH), "it has no eps that could be read"),
]


def named(cases):
    return [str(c[1]) for c in cases]


class Around(nn.Module):
    """A model that consists of a norm."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, **rows):
        return self.norm(*rows.values())


def rows(dtype=torch.float32, width=WIDTH):
    return torch.randn(3, 5, width, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("which", KNOWN, ids=named(KNOWN))
def test_a_norm_of_transformers_is_known_by_what_it_does(which, dtype):
    norm = norm_of(*which).to(dtype)
    assert describe(norm) == Norm("rms", "transformers", describe(norm).eps)
    report = check_exact(Around(norm), {"x": rows(dtype)})
    assert fused_sites(report) == {"norm": 1}


@pytest.mark.parametrize(("which", "why"), UNKNOWN, ids=named([u[0] for u in UNKNOWN]))
def test_what_only_looks_like_one_is_left_alone_with_the_reason(which, why):
    model = Around(norm_of(*which))
    shape = (4, 16) if which[2] == (4, 16) else (WIDTH,)
    given = [torch.randn(3, *shape)] * (2 if why == MORE else 1)
    expected = model.norm(*given)
    report = kw.inject(model)
    assert report.replaced == 0
    assert [line.left_alone for line in report.lines] == [why]
    assert torch.equal(model.norm(*given), expected)


def test_an_axis_is_not_taken_for_a_width():
    """Mochi's VAE has such a norm; its pipeline could not be injected."""
    lp_norm = import_module("diffusers.models.normalization").LpNorm()
    assert lp_norm.dim == -1
    assert describe(lp_norm) == OTHER


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_a_layer_norm_of_torch_with_and_without_its_parts(affine, bias, dtype):
    norm = nn.LayerNorm(WIDTH, elementwise_affine=affine, bias=bias).to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    report = check_exact(Around(norm), {"x": rows(dtype)})
    assert fused_sites(report) == {"norm": 1}


STRIDED = "its rows are not contiguous in memory"


@pytest.mark.parametrize(("numerics", "fate"), [("exact", STRIDED), ("fused", "fused")])
@torch.no_grad()
def test_rows_across_memory_stay_where_they_are(numerics, fate):
    """As a VAE normalises its channels: eager keeps the layout for the next convolution."""
    norm = norm_of("llama", "LlamaRMSNorm", WIDTH)
    x = rows().transpose(-1, -2).contiguous().transpose(-1, -2)
    expected = norm(x)
    with kw.injected(Around(norm), numerics=numerics) as report:
        result = norm(x)
    if numerics == "exact":
        assert same(result, expected)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()
    assert list(report.sites["norm"]) == [fate]


@pytest.mark.parametrize("shape", [(WIDTH,), (6, WIDTH), (2, 5, 3, WIDTH)], ids=str)
@torch.no_grad()
def test_rows_that_no_kernel_reads_where_they_are_stay_eager(shape):
    norm = norm_of("llama", "LlamaRMSNorm", WIDTH)
    x = rows().new_ones(*shape, 2)[..., 0]
    expected = norm(x)
    with kw.injected(Around(norm), numerics="fused") as report:
        assert same(norm(x), expected)
    assert list(report.sites["norm"]) == [STRIDED]


def test_an_eps_that_pytorch_chooses_is_the_one_it_chooses():
    """Where activations are small, eps decides the result."""
    norm = nn.RMSNorm(WIDTH, eps=None).to(torch.bfloat16)
    x = rows(torch.bfloat16) * 0.01
    expected = norm(x).float()
    with kw.injected(Around(norm), numerics="fused"):
        result = norm(x).float()
    torch.testing.assert_close(result, expected, rtol=2**-7, atol=0)


def test_norms_without_eps_and_rows_given_by_name_compile_whole():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=None)

        def forward(self, x):
            return self.second(self.first(input=x))

    model, x = Both(), rows()
    with torch.no_grad(), kw.injected(model):
        expected = model(x)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-6)


def test_weights_in_float32_in_a_model_of_bfloat16():
    """Eager then returns float32; a kernel would not."""
    report = check_exact(
        Around(norm_of("llama", "LlamaRMSNorm", WIDTH)), {"x": rows(torch.bfloat16)}
    )
    assert report.sites == {"norm": {"eager changes the dtype here": 1}}


def test_rows_given_by_name():
    norm = norm_of("llama", "LlamaRMSNorm", WIDTH)
    expected = norm(rows())
    with kw.injected(Around(norm)):
        assert same(norm(hidden_states=rows()), expected)


def test_another_weight_and_another_eps_are_seen():
    norm = norm_of("t5", "T5LayerNorm", WIDTH)
    model = Around(norm)
    kw.inject(model)
    before = norm(rows())
    norm.weight.data.mul_(2)
    assert torch.equal(norm(rows()), 2 * before)
    norm.variance_epsilon = 1.0
    expected = type(norm).forward(norm, rows())
    assert torch.equal(norm(rows()), expected)
    assert not torch.equal(expected, 2 * before)


def test_norms_that_do_the_same_are_probed_once_and_others_each(monkeypatch):
    class Scaled(nn.Module):
        """A norm whose class is nobody's; `double` makes it another one."""

        def __init__(self, double=False):
            super().__init__()
            self.weight, self.eps, self.double = nn.Parameter(torch.ones(WIDTH)), 1e-6, double

        def forward(self, x):
            y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * y.to(x.dtype) * (2 if self.double else 1)

    Scaled.__name__ = "ScaledNorm"
    calls = []
    plain = Scaled.forward
    Scaled.forward = lambda self, x: calls.append(self) or plain(self, x)
    alike = [Scaled() for _ in range(5)]
    assert len({describe(m) for m in alike}) == 1
    assert isinstance(describe(alike[0]), Norm)
    once = len(calls)
    assert once == 3  # one for each dtype
    assert describe(Scaled(double=True)) == OTHER
    assert len(calls) > once
    # another forward of the class is another norm, for modules that were known as well
    Scaled.forward = lambda self, x: plain(self, x) + 1
    assert describe(alike[0]) == OTHER
    assert describe(Scaled()) == OTHER
