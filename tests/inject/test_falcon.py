"""Falcon: its three block layouts, RoPE and alibi, with and without a cache."""

import pytest
import torch
from everything import share
from torch import nn
from transformers import FalconConfig, FalconForCausalLM

import kernelwright as kw
from inject.harness import check_exact, check_fused, fused_sites, run, same
from inject.language import LAYERS, words
from kernelwright import models
from kernelwright.inject.fusions import all_scores
from kernelwright.inject.fusions import attention as fusions
from kernelwright.inject.verify import accuracy

# 7B: one norm, parallel branches. 40B: a norm for each branch. 1B: sequential branches
SEVEN = {"parallel_attn": True, "multi_query": True, "new_decoder_architecture": False}
FORTY = {"new_decoder_architecture": True, "num_kv_heads": 2}
ELEVEN = {**FORTY, "num_ln_in_parallel_attn": 1}
ONE = {"parallel_attn": False, "multi_query": False, "new_decoder_architecture": False}
ALIBI = {**ONE, "alibi": True, "bias": True}

SITES = {
    "7B": (SEVEN, {"norm": 1, "residual + norm": LAYERS, "RoPE": LAYERS}),
    # the norm of the second branch reads the input of the first: it stays unfused
    "40B": (FORTY, {"norm": 1 + LAYERS, "residual + norm": LAYERS, "RoPE": LAYERS}),
    "11B": (ELEVEN, {"norm": 1, "residual + norm": LAYERS, "RoPE": LAYERS}),
    "one after the other": (ONE, {"norm": 1, "residual + norm": 2 * LAYERS, "RoPE": LAYERS}),
    "alibi": (ALIBI, {"norm": 1, "residual + norm": 2 * LAYERS}),
}


def falcon(dtype=torch.float32, **config):
    torch.manual_seed(0)
    model = FalconForCausalLM(
        FalconConfig(
            vocab_size=128,
            hidden_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **config,
        )
    ).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return nn.Module.to(model, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SITES)
def test_exact_gives_the_bits_of_eager(kind, dtype):
    config, sites = SITES[kind]
    assert fused_sites(check_exact(falcon(dtype, **config), words())) == sites


def test_fused_errs_no_more_than_eager(monkeypatch):
    monkeypatch.setattr(all_scores, "MIN_QUERIES", 1)
    report = check_fused(falcon(torch.bfloat16, **SEVEN), words())
    assert fused_sites(report) == SITES["7B"][1] | {"attention": 2}


@pytest.mark.parametrize("padded", [False, True])
def test_fused_attention_of_shared_keys_is_causal_without_a_mask(padded, monkeypatch):
    """PyTorch would compute all scores; with padding the mask is needed."""
    given = []

    def attention(query, key, value, mask, causal):
        given.append((key.shape[1], mask is None, causal))
        return attend(query, key, value, mask, causal=causal)

    monkeypatch.setattr(all_scores, "MIN_QUERIES", 1)
    attend = fusions.attention
    monkeypatch.setattr(fusions, "attention", attention)
    mask = torch.ones(2, 7, dtype=torch.long)
    if padded:
        mask[0, :3] = 0
    check_fused(falcon(torch.bfloat16, **SEVEN), words(attention_mask=mask))
    assert set(given) == {(1, not padded, not padded)}


def test_the_preset_takes_part_with_every_layer():
    model = models.build("falcon-7b", device="meta")
    report = kw.inspect(model)
    assert report.count("FalconDecoderLayer") == report.count("FalconAttention") == 32
    assert report.count("LayerNorm") == 33


@pytest.mark.parametrize("kind", SITES)
def test_a_padding_mask_counts(kind):
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    model = falcon(**SITES[kind][0])
    check_exact(model, words(attention_mask=mask))
    with kw.injected(model):
        assert not same(run(model, words(attention_mask=mask)), run(model, words()))


@pytest.mark.parametrize("kind", ["7B", "40B", "alibi"])
def test_generated_tokens_and_logits_are_those_of_eager(kind):
    model = falcon(torch.bfloat16, **SITES[kind][0])

    def generate():
        return model.generate(
            words()["input_ids"],
            max_new_tokens=8,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )

    expected = generate()
    with kw.injected(model) as report:
        for _ in range(2):
            got = generate()
            assert torch.equal(got.sequences, expected.sequences)
            assert all(map(torch.equal, got.logits, expected.logits))
    assert not report.problems
    assert fused_sites(report) == SITES[kind][1]


@pytest.mark.parametrize("use_cache", [True, False])
def test_states_and_attentions_asked_for_are_those_of_eager(use_cache):
    model = falcon(**SEVEN)
    inputs = words(output_hidden_states=True, output_attentions=True) | {"use_cache": use_cache}
    expected = run(model, inputs)
    with kw.injected(model) as report:
        for _ in range(2):
            got = run(model, inputs)
            assert len(got.attentions) == LAYERS
            assert same(got.hidden_states, expected.hidden_states)
            assert same(got.attentions, expected.attentions)
    assert "RoPE" not in report.sites  # only its own forward returns attentions


def test_dropout_falls_as_in_eager():
    model = falcon(**SEVEN, hidden_dropout=0.3).train()
    with kw.injected(model) as report:
        for _ in range(2):
            torch.manual_seed(1)
            got = run(model, words())
        assert not report.problems
    torch.manual_seed(1)
    assert same(run(model, words()), got)
    assert not same(run(model, words()), got)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training(checkpointing):
    model, inputs = falcon(**SEVEN).train(), words()
    if checkpointing:
        model.gradient_checkpointing_enable()

    def gradients():
        model.zero_grad()
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    loss, expected = gradients()
    with kw.injected(model) as report:
        for _ in range(2):
            got, grads = gradients()
            assert torch.equal(got, loss)
            assert all(map(torch.equal, grads, expected))
        assert not report.problems


@pytest.mark.parametrize("numerics", share(["exact", "fused"], 2, start=1))
def test_compiled_whole_it_gives_what_it_gives_injected(numerics, monkeypatch):
    monkeypatch.setattr(all_scores, "MIN_QUERIES", 1)
    model, inputs = falcon(torch.bfloat16, **SEVEN), words()
    eager = run(model, inputs).logits
    with kw.injected(model, numerics=numerics):
        expected = run(model, inputs).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        result = run(compiled, inputs).logits
    torch.compiler.reset()
    if numerics == "exact":
        assert torch.equal(result, expected)
    else:  # attention with its mask, which is not read then
        truth = run(model.float(), inputs).logits
        error, eagers = (accuracy.error(t, truth) for t in (result, eager))
        assert accuracy.holds(accuracy.rows(eager), error, eagers)


def test_an_adapter_on_a_projection_counts():
    from peft import LoraConfig

    model, inputs = falcon(**SEVEN), words()
    plain = run(model, inputs)
    targets = ["query_key_value", "dense_h_to_4h"]
    model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    assert not same(run(model, inputs), plain)
    assert fused_sites(check_exact(model, inputs)) == SITES["7B"][1]
