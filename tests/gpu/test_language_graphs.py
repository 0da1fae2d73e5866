"""Graphs of language models and text encoders on a GPU: the bits of eager, whatever is masked."""

import pytest
import torch
from inject.harness import frames, run, same

import kernelwright as kw
from kernelwright import models

transformers = pytest.importorskip("transformers")
# Falcon makes its mask on the CPU, which a capture refuses
LANGUAGE = ("llama-3-8b", "mistral-7b", "qwen3-8b")
HOW = {"tiny": True, "dtype": torch.bfloat16, "device": "cuda"}
OTHER_MASK = "its inputs need another attention mask than those at its capture"


def check(model, inputs):
    """Every call gives eager's bits; returns the graphs."""
    expected = [run(model, given) for given in inputs]
    with kw.injected(model, graphs=True) as report:
        for given, wanted in zip(inputs, expected, strict=True):
            assert same(run(model, given), wanted)
        (graphs,) = report.graphs
        assert graphs.captured == 1, graphs.describe()
    return graphs


@pytest.mark.parametrize("tokens", [16, 300])
@pytest.mark.parametrize("name", LANGUAGE)
def test_a_prefill_is_replayed(name, tokens):
    inputs = [models.inputs(name, **HOW, tokens=tokens, seed=seed) for seed in range(5)]
    assert check(models.build(name, **HOW), inputs).reasons == {}


def test_embeddings_in_place_of_words_are_replayed():
    model = models.build("llama-3-8b", **HOW)
    words = [models.inputs("llama-3-8b", **HOW, seed=seed)["input_ids"] for seed in range(4)]
    embed = model.get_input_embeddings()
    with torch.no_grad():
        inputs = [{"inputs_embeds": embed(w), "use_cache": False} for w in words]
    assert check(model, inputs).reasons == {}


PADDED, LESS_PADDED, WHOLE = ([0] * n + [1] * (16 - n) for n in (5, 2, 0))
ONE, TWO, THREE = (
    list(range(16)),
    [*range(6), *range(10)],
    [*range(4), *range(4), *range(8)],
)


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("attention_mask", [PADDED, PADDED, LESS_PADDED, WHOLE, PADDED]),
        ("attention_mask", [WHOLE, WHOLE, WHOLE, PADDED, WHOLE]),
        ("position_ids", [TWO, TWO, THREE, ONE, TWO]),
        ("position_ids", [ONE, ONE, ONE, TWO, ONE]),
    ],
    ids=["padded", "whole", "packed", "one sequence"],
)
@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-8b"])
def test_a_mask_is_what_each_call_needs(name, what, values):
    """The fourth call of each is masked in another way than the graph, and runs without it."""
    inputs = [
        models.inputs(name, **HOW, seed=seed) | {what: torch.tensor([v], device="cuda")}
        for seed, v in enumerate(values)
    ]
    assert check(models.build(name, **HOW), inputs).reasons == {OTHER_MASK: 1}


def test_a_cache_among_the_results_runs_without_a_graph():
    model = models.build("llama-3-8b", **HOW)
    inputs = models.inputs("llama-3-8b", **HOW) | {"use_cache": True}
    expected = run(model, inputs).logits
    with kw.injected(model, graphs=True) as report:
        results = [run(model, inputs) for _ in range(4)]
    assert all(torch.equal(r.logits, expected) for r in results)
    assert report.graphs[0].reasons == {"an output of type DynamicCache": 3}


@pytest.mark.parametrize("hidden_states", [False, True])
@pytest.mark.parametrize("kind", ["CLIPTextModel", "CLIPTextModelWithProjection"])
def test_clip_is_replayed(kind, hidden_states):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    config = transformers.CLIPTextConfig(num_hidden_layers=3, projection_dim=64, **sizes)
    model = getattr(transformers, kind)(config).eval().to("cuda", torch.float16)
    inputs = [
        {
            "input_ids": torch.randint(3, 1000, (1, 77), device="cuda"),
            "output_hidden_states": hidden_states,
        }
        for _ in range(4)
    ]
    assert check(model, inputs).reasons == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [None, (40, 90, 7, 64)], ids=["no mask", "masks"])
def test_t5_is_replayed(dtype, lengths):
    model = models.ltx_pipeline(tiny=True, dtype=dtype, device="cuda").text_encoder
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.float()  # as transformers loads it
    inputs = [
        {"input_ids": torch.randint(3, 300, (1, 128), device="cuda")} for _ in lengths or range(4)
    ]
    for given, length in zip(inputs, lengths or (), strict=False):
        given["attention_mask"] = torch.arange(128, device="cuda").lt(length)[None].long()
    assert check(model, inputs).reasons == {}


@pytest.fixture
def pipe():
    made = models.ltx_pipeline(**HOW)
    made.set_progress_bar_config(disable=True)
    return made


def test_a_pipeline_replays_its_text_encoder_and_its_denoiser(pipe):
    prompts = ("a lighthouse", "snow", "a boat on a lake")
    expected = [frames(pipe, prompt, steps=3) for prompt in prompts]
    with kw.injected(pipe, graphs=True) as report:
        for prompt, wanted in zip(prompts, expected, strict=True):
            assert torch.equal(frames(pipe, prompt, steps=3), wanted)
        told = report.to_dict()["graphs"]
    assert told == ["text_encoder: 1 graph", "transformer: 1 graph"]


@pytest.mark.compatibility("model CPU offload")
@pytest.mark.parametrize("first", ["inject", "offload"])
def test_an_offloaded_pipeline_runs_without_graphs(pipe, first):
    expected = frames(pipe, "a lighthouse", steps=3)
    if first == "inject":
        report = kw.inject(pipe, graphs=True)
    pipe.enable_model_cpu_offload()
    if first == "offload":
        report = kw.inject(pipe, graphs=True)
    for _ in range(3):
        assert torch.equal(frames(pipe, "a lighthouse", steps=3), expected)
    assert [graphs.captured for graphs in report.graphs] == [0, 0]
    pipe.remove_all_hooks()
    kw.restore(pipe)


@pytest.mark.compatibility("generate with a static cache")
@pytest.mark.parametrize(
    "name", ["llama-3-8b", "qwen3-8b", "gemma-3-12b", "gemma-4-31b", "phi-4", "glm-4-9b"]
)
@pytest.mark.parametrize("batch", [1, 4])
def test_steps_of_generate_are_replays(name, batch):
    """With a static cache, as people write it: `generate` would compile the model otherwise."""
    model = models.build(name, **HOW)
    size = model.config.get_text_config().vocab_size
    words = torch.randint(3, size, (batch, 9), device="cuda")
    mask = torch.ones_like(words)
    mask[0, : batch - 1] = 0
    given = {"input_ids": words, "attention_mask": mask, "do_sample": False}
    given |= {"max_new_tokens": 24, "min_new_tokens": 24, "cache_implementation": "static"}
    given |= {"return_dict_in_generate": True, "output_logits": True}
    want = model.generate(**given, disable_compile=True)
    with kw.injected(model, graphs=True) as report:
        for _ in range(3):
            got = model.generate(**given)
            assert torch.equal(got.sequences, want.sequences)
            assert all(map(torch.equal, got.logits, want.logits))
            del got
        (graphs,) = report.graphs
        # of three calls: the prompts, and what a capture and a full sliding window take
        assert graphs.captured >= 1, graphs.describe()
        assert sum(graphs.reasons.values()) <= 6, graphs.describe()


@pytest.mark.parametrize("sampled", [False, True])
def test_generating_a_token_ahead_leaves_tokens_and_random_numbers_as_they_are(sampled):
    model = models.build("llama-3-8b", **HOW)
    words = torch.randint(3, model.config.vocab_size, (1, 9), device="cuda")
    given = {"inputs": words, "do_sample": sampled, "cache_implementation": "static"}
    given |= {"max_new_tokens": 24, "pad_token_id": 0, "disable_compile": True}

    def generated(**how):
        torch.manual_seed(0)
        return model.generate(**given, **how), torch.rand(4, device="cuda")

    end = generated()[0][0, 9 + 12].item()
    wanted = [generated(eos_token_id=end), generated(eos_token_id=None)]
    with kw.injected(model, graphs=True) as report:
        for _ in range(3):
            for (tokens, after), eos in zip(wanted, (end, None), strict=True):
                got = generated(eos_token_id=eos)
                assert torch.equal(got[0], tokens)
                assert torch.equal(got[1], after)
        assert report.graphs[0].captured >= 1
