"""Decoding into a static cache on a GPU: RoPE and the update of the cache as one kernel."""

import pytest
import torch
import transformers
from inject.language import model_of, words

import kernelwright as kw
from kernelwright.inject.fp8 import suitable_layers
from kernelwright.inject.fusions.static_cache import SITE
from kernelwright.ops.case import Inputs
from kernelwright.ops.rope_into_cache import ROPE_INTO_CACHE as OP
from kernelwright.profiling.record import record

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
STATIC = {"cache_implementation": "static", "disable_compile": True, "do_sample": False}


def written(given):
    return [given[n] for n in OP.writes]


def copied(given):
    return {n: t.clone() if n in OP.writes else t for n, t in given.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OP.cases, ids=lambda case: case.name)
def test_the_kernel_writes_what_eager_writes(case, dtype):
    """Also where many blocks read the length, in whatever order they come."""
    given = case.arguments(Inputs(dtype, "cuda"))
    theirs = copied(given)
    want = OP.call(theirs, exact="transformers", backend="torch")
    versions = [t._version for t in written(given)]
    for _ in range(20):
        ours = copied(given)
        assert torch.equal(OP.call(ours, exact="transformers", backend="cuda"), want)
        assert all(map(torch.equal, written(ours), written(theirs)))
    OP.call(given, exact="transformers", backend="cuda")
    assert all(t._version > v for t, v in zip(written(given), versions, strict=True))


def test_replays_of_a_graph_write_one_position_after_the_other():
    case = next(c for c in OP.cases if c.name == "llama, eight tokens")
    given = case.arguments(Inputs(torch.bfloat16, "cuda"))
    theirs = copied(given)
    OP.call(copied(given), exact="transformers", backend="cuda")  # builds the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        OP.call(given, exact="transformers", backend="cuda")
    for _ in range(50):
        graph.replay()
        OP.call(theirs, exact="transformers", backend="torch")
    assert all(map(torch.equal, written(given), written(theirs)))


@pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_generate_has_the_bits_of_eager(family, batch, graphs):
    sizes = {"hidden_size": 256, "head_dim": 64, "sliding_window": None}
    model = model_of(family, torch.bfloat16, **sizes).cuda()
    given = {n: t.cuda() for n, t in words(batch, 9).items() if n == "input_ids"}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given["attention_mask"][0, : batch - 1] = 0
    how = {**STATIC, "max_new_tokens": 32, "min_new_tokens": 32}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    want = model.generate(**given, **how)
    with kw.injected(model, graphs=graphs) as report:
        for _ in range(2):
            got = model.generate(**given, **how)
            assert torch.equal(got.sequences, want.sequences)
            assert all(map(torch.equal, got.logits, want.logits))
            for ours, theirs in zip(
                got.past_key_values.layers, want.past_key_values.layers, strict=True
            ):
                assert torch.equal(ours.keys, theirs.keys)
                assert torch.equal(ours.values, theirs.values)
                assert torch.equal(ours.cumulative_length, theirs.cumulative_length)
            del got, ours
    assert report.sites[SITE] == {"fused": 2}


@pytest.mark.parametrize("numerics", ["exact", "fused", "fp8"])
def test_a_replay_has_the_kernel(monkeypatch, numerics):
    monkeypatch.setattr(suitable_layers, "ROWS", 16)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    model = model_of("Llama", torch.bfloat16, **sizes).cuda()
    prompt = words(1, 24)["input_ids"].cuda()
    how = {**STATIC, "max_new_tokens": 12, "min_new_tokens": 12}
    with kw.injected(model, numerics=numerics, graphs=True) as report:
        for _ in range(2):
            model.generate(prompt, **how)
        kernels = {k.name: k.calls for k in record(lambda: model.generate(prompt, **how), "cuda")}
        assert report.graphs[0].captured == 1
    # the prompt gives the first token; both layers decode the others
    assert kernels["kernelwright_rope_into_cache"] == 2 * 11


def test_a_decoded_token_takes_one_kernel_for_each_cache():
    model = model_of("Llama", torch.bfloat16).cuda()
    prompt = words(1, 9)["input_ids"].cuda()
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)

    def step(given):
        with torch.no_grad():
            model(input_ids=given, past_key_values=cache, use_cache=True)

    with kw.injected(model):
        for given in (prompt, prompt[:, :1], prompt[:, :1]):
            step(given)
        kernels = {k.name: k.calls for k in record(lambda: step(prompt[:, :1]), "cuda")}
    assert kernels["kernelwright_rope_into_cache"] == 2
    assert "kernelwright_rope" not in kernels
    assert not any("index_copy" in name for name in kernels)
