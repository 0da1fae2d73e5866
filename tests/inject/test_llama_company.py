"""An injected Llama with caches, output recorders, hooks, adapters, training and torch.compile."""

import copy

import pytest
import torch
import transformers
from everything import share
from torch import nn

import kernelwright as kw
from inject.harness import check_exact, fused_sites, left_behind, run, same
from inject.language import LAYERS, model_of, words
from kernelwright.inject.fusions import feed_forward


def generate(model, cache):
    return model.generate(
        words()["input_ids"],
        max_new_tokens=8,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        cache_implementation=cache,
        disable_compile=True,
    )


@pytest.mark.compatibility("generate with a dynamic cache", "generate with a static cache")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3"])
def test_generated_tokens_and_logits_are_those_of_eager(family, cache):
    model = model_of(family, torch.bfloat16)
    expected = generate(model, cache)
    with kw.injected(model) as report:
        for _ in range(2):
            got = generate(model, cache)
            assert torch.equal(got.sequences, expected.sequences)
            assert all(map(torch.equal, got.logits, expected.logits))
    assert not report.problems
    assert fused_sites(report)["residual + norm"] == 2 * LAYERS


def test_a_cache_is_written_once_a_call():
    model = model_of("Llama")
    caches = []
    for injected in (False, True):
        if injected:
            kw.inject(model)
        cache = transformers.DynamicCache()
        for _ in range(2):
            run(model, words(past_key_values=cache, use_cache=True))
        caches.append([(layer.keys, layer.values) for layer in cache.layers])
    assert all(keys.shape[2] == 14 for keys, _ in caches[1])
    assert same(*caches)


def test_a_place_that_differs_stays_eager_where_a_cache_is_written(monkeypatch):
    monkeypatch.setattr(feed_forward, "SILU_MUL", lambda gate, up, **_: gate * up)
    model = model_of("Llama")
    expected = generate(model, "dynamic")
    with kw.injected(model) as report, pytest.warns(UserWarning, match="SwiGLU differs"):
        got = generate(model, "dynamic")
    assert all(map(torch.equal, got.logits, expected.logits))
    assert len(report.problems) == 2 * LAYERS  # at the prompt, and at the first token after it
    assert "SwiGLU" not in fused_sites(report)
    assert fused_sites(report)["RoPE"] == LAYERS


def test_recorded_states_and_attentions_are_those_of_eager():
    model = model_of("Llama")
    model.set_attn_implementation("eager")
    inputs = words(output_hidden_states=True, output_attentions=True) | {"use_cache": True}
    expected = run(model, inputs)
    with kw.injected(model):
        for _ in range(2):
            got = run(model, inputs)
            assert len(got.attentions) == LAYERS
            assert same(got.hidden_states, expected.hidden_states)
            assert same(got.attentions, expected.attentions)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_work_done_ahead_is_taken_once_and_by_the_right_layer(mode):
    model, inputs = model_of("Llama"), words()
    expected = run(model, inputs)
    with kw.injected(model), mode():
        for _ in range(2):
            assert same(model(**inputs), expected)
        model.model.layers = nn.ModuleList(reversed(model.model.layers))
        reordered = model(**inputs)
    assert same(reordered, run(model, inputs))
    assert not same(reordered, expected)


def test_a_hook_between_two_layers_is_heard():
    model, inputs = model_of("Llama"), words()
    heard = []
    first, second = model.model.layers
    first.register_forward_hook(lambda module, args, output: output + 1)
    second.input_layernorm.register_forward_hook(lambda *call: heard.append(call))
    expected = run(model, inputs)
    with kw.injected(model):
        run(model, inputs)
        heard.clear()
        assert same(run(model, inputs), expected)
    assert len(heard) == 1


@pytest.mark.compatibility("autocast")
def test_autocast_keeps_its_dtypes():
    model, inputs = model_of("Llama"), words()
    with torch.autocast("cpu", torch.bfloat16):
        report = check_exact(model, inputs)
    assert report.sites["RoPE"] == {"eager changes the dtype here": LAYERS}
    assert fused_sites(report)["SwiGLU"] == LAYERS


def test_an_adapter_on_a_projection_counts():
    from peft import LoraConfig

    model, inputs = model_of("Qwen3", torch.bfloat16), words()
    plain = run(model, inputs)
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    assert not same(run(model, inputs), plain)
    report = check_exact(model, inputs)
    assert fused_sites(report)["QK-norm + RoPE"] == LAYERS


def test_a_model_inside_another_is_found():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model_of("Llama"), LoraConfig(target_modules=["q_proj"]))
    report = check_exact(model, words())
    assert fused_sites(report)["residual + norm"] == 2 * LAYERS


def gradients(model):
    model.zero_grad()
    inputs = words()
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training(checkpointing):
    model = model_of("Qwen3").train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    loss, expected = gradients(model)
    with kw.injected(model) as report:
        for _ in range(2):
            got, grads = gradients(model)
            assert torch.equal(got, loss)
            assert all(map(torch.equal, grads, expected))
        assert not report.problems
    assert any("Qwen3DecoderLayer" in line for line in report.gradients)


@pytest.mark.parametrize(
    ("family", "numerics"),
    share([("Llama", "exact"), ("Qwen3", "exact"), ("Qwen3", "fused"), ("Llama", "fused")], 2),
)
def test_compiled_whole_it_gives_what_it_gives_injected(family, numerics):
    model, inputs = model_of(family, torch.bfloat16), words()
    with kw.injected(model, numerics=numerics):
        expected = run(model, inputs).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(run(compiled, inputs).logits, expected)
    torch.compiler.reset()


def test_compiled_with_a_cache_it_gives_the_bits_of_eager():
    model = model_of("Qwen3", torch.bfloat16, num_hidden_layers=1)

    def filled(call):
        cache = transformers.StaticCache(model.config, max_cache_len=16)
        for _ in range(2):
            logits = run(call, words(past_key_values=cache, use_cache=True)).logits
        return logits, [(layer.keys, layer.values) for layer in cache.layers]

    expected = filled(model)
    with kw.injected(model):
        assert same(filled(torch.compile(model, fullgraph=True, backend="eager")), expected)
    torch.compiler.reset()


def test_compiled_by_layers_it_gives_the_bits_of_eager():
    model, inputs = model_of("Llama", torch.bfloat16), words()
    expected = run(model, inputs)
    with kw.injected(model):
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="eager")
        assert same(run(model, inputs), expected)
    torch.compiler.reset()


def test_a_copy_is_injected_and_restored_on_its_own():
    model, inputs = model_of("Llama"), words()
    expected = run(model, inputs)
    kw.inject(model)
    twin = copy.deepcopy(model)
    assert same(run(twin, inputs), expected)
    kw.restore(model)
    kw.restore(twin)
    assert left_behind(model) == left_behind(twin) == []
