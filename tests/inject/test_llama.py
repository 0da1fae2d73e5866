"""Llama-like models: recognised by their code, every fusion site used, eager's bits."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from transformers.integrations import sdpa_attention

import kernelwright as kw
from inject.harness import check_exact, check_fused, fused_sites, programs_of, run, same
from inject.language import LAYERS, model_of, words
from kernelwright import models
from kernelwright.fuser import recording
from kernelwright.fuser.recording import CannotRecord
from kernelwright.inject.fusions import attention
from kernelwright.inject.identify.source import fingerprint
from kernelwright.inject.recipes._any_block import BLOCK

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
WINDOW = {"use_sliding_window": True, "max_window_layers": 1}
# each layer adds twice, and a norm follows every addition; only the first norm follows none
WHOLE = {"norm": 1, "residual + norm": 2 * LAYERS, "RoPE": LAYERS, "SwiGLU": LAYERS}
ROWS = {"norm": 1, "residual + norm": 2 * LAYERS}


def expected_of(family):
    if family != "Qwen3":
        return WHOLE
    return {**ROWS, "QK-norm + RoPE": LAYERS, "SwiGLU": LAYERS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3"])
def test_exact_gives_the_bits_of_eager(family, dtype):
    report = check_exact(model_of(family, dtype), words())
    assert fused_sites(report) == expected_of(family)
    for kind in ("DecoderLayer", "Attention", "MLP"):
        assert report.count(f"{family}{kind}") == LAYERS


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_fused_errs_no_more_than_eager(family):
    report = check_fused(model_of(family, torch.bfloat16), words())
    assert fused_sites(report) == expected_of(family)


PRESETS = {"llama-3-8b": ("Llama", 65), "mistral-7b": ("Mistral", 65), "qwen3-8b": ("Qwen3", 145)}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_takes_part_with_every_layer(name):
    family, norms = PRESETS[name]
    model = models.build(name, device="meta")
    report = kw.inspect(model)
    for kind in ("DecoderLayer", "Attention", "MLP"):
        assert report.count(f"{family}{kind}") == model.config.num_hidden_layers
    assert report.count(f"{family}RMSNorm") == norms


KIN = [
    # a window is a mask: of one layer, and of both; PyTorch copies keys and values for it
    ("Qwen2", {"sliding_window": 4, **WINDOW}, {**WHOLE, "heads that share keys and values": 1}),
    ("Mistral", {"sliding_window": 4}, {**WHOLE, "heads that share keys and values": LAYERS}),
    ("Ministral", {}, WHOLE),
    ("Arcee", {}, {k: n for k, n in WHOLE.items() if k != "SwiGLU"}),
    ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 32}, WHOLE),
    ("Qwen3Moe", EXPERTS, {**ROWS, "QK-norm + RoPE": LAYERS}),
]
# the recipe knows their layers, but not their attention; no norm follows the addition of another
# module
APART = {"norm": LAYERS + 1, "residual + norm": LAYERS}
PARTLY = [
    ("Glm", {}, APART),
    ("Starcoder2", {}, APART),
    ("SmolLM3", {}, {**APART, "SwiGLU": LAYERS}),
    ("Ernie4_5", {}, {**APART, "SwiGLU": LAYERS}),
    # two norms of MLA in each layer, a dense layer and the shared experts of the other
    ("DeepseekV3", DEEPSEEK, {**APART, "norm": 3 * LAYERS + 1, "SwiGLU": 2}),
]
DISTANT = [
    # their layers add differently, their norms and attention are the same
    ("Granite", {}, {"norm": 5, "RoPE": LAYERS, "SwiGLU": LAYERS}),
    ("Mixtral", {"num_local_experts": 4}, {"norm": 5, "RoPE": LAYERS}),
    ("Phi3", {}, {"norm": 5}),
    # the kernels do not support their norms
    ("Gemma", {}, {"RoPE": LAYERS}),
    ("Olmo", {}, {"SwiGLU": LAYERS}),
    ("Cohere", {}, {"SwiGLU": LAYERS}),
]


@pytest.mark.parametrize(("family", "config", "sites"), KIN, ids=[k[0] for k in KIN])
def test_kin_are_known_by_their_code(family, config, sites):
    report = check_exact(model_of(family, torch.bfloat16, **config), words())
    assert fused_sites(report) == sites


@pytest.mark.parametrize(("family", "config", "sites"), PARTLY, ids=[k[0] for k in PARTLY])
def test_layers_with_attention_of_other_code_run_as_programs(family, config, sites, monkeypatch):
    """The recipe serves calls that cannot be recorded."""
    model, layer = model_of(family, torch.bfloat16, **config), f"{family}DecoderLayer"
    programs, others = programs_of(check_exact(model, words()))
    assert set(programs) == {layer}
    assert others == {"norm": 1}

    def refused(*args, **kwargs):
        raise CannotRecord("not today")

    monkeypatch.setattr(recording, "record", refused)
    assert fused_sites(check_exact(model, words())) == sites


@pytest.mark.parametrize(("family", "config", "sites"), DISTANT, ids=[k[0] for k in DISTANT])
def test_layers_without_a_recipe_run_as_programs(family, config, sites):
    """The recipes of what is inside them apply where the layers themselves are left alone."""
    model, layer = model_of(family, torch.bfloat16, **config), f"{family}DecoderLayer"
    report = check_exact(model, words())
    programs, others = programs_of(report)
    assert set(programs) == {layer}
    assert set(programs[layer].values()) == {LAYERS}
    # the norm behind the last layer
    assert others == ({"norm": 1} if "norm" in sites else {})
    assert fused_sites(check_exact(model, words(), skip=layer)) == sites


def reasons(report):
    return {
        line.kind.rpartition(".")[2]: line.left_alone for line in report.lines if line.left_alone
    }


def test_the_report_says_what_gemma_does_otherwise():
    model = model_of("Gemma")
    assert kw.inspect(model).count("GemmaDecoderLayer") == LAYERS  # as programs
    said = reasons(kw.inspect(model, skip="GemmaDecoderLayer"))
    assert said["GemmaRMSNorm"] == "it multiplies by 1 + weight, not by weight"
    assert said["GemmaMLP"] == "its activation is GELUTanh, not SiLU"


def test_code_that_was_changed_is_recorded_as_it_is_now():
    """No recipe fits it, and a recording of the changed code has its bits."""
    from transformers.models.llama import modeling_llama as llama

    class Louder(llama.LlamaDecoderLayer):
        def forward(self, hidden_states, **kwargs):
            return 2 * super().forward(hidden_states, **kwargs)

    model = model_of("Llama")
    model.model.layers[0].__class__ = Louder
    report = check_exact(model, words())
    (louder,) = (line for line in report.lines if line.kind.endswith("Louder"))
    (usual,) = (line for line in report.lines if line.kind.endswith("LlamaDecoderLayer"))
    assert louder.replaced_by == BLOCK.does != usual.replaced_by
    assert report.count("LlamaDecoderLayer") == LAYERS - 1
    programs, others = programs_of(report)
    assert set(programs) == {"Louder"}
    assert others["SwiGLU"] == LAYERS - 1


def test_changed_code_with_an_effect_is_left_alone():
    from transformers.models.llama import modeling_llama as llama

    calls = []

    class Counting(llama.LlamaDecoderLayer):
        def forward(self, hidden_states, **kwargs):
            calls.append(hidden_states.shape)
            return super().forward(hidden_states, **kwargs)

    model = model_of("Llama")
    model.model.layers[0].__class__ = Counting
    expected = run(model, words())
    calls.clear()
    with kw.injected(model) as report:
        for called in (1, 2, 3):
            assert same(run(model, words()), expected)
            assert len(calls) == called
    assert programs_of(report)[0] == {}


def turned_the_other_way(x):
    return -x


def test_a_fingerprint_reaches_into_what_is_called():
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
    from transformers.models.mistral.modeling_mistral import MistralMLP

    assert fingerprint(LlamaMLP.forward) == fingerprint(MistralMLP.forward)
    forward = LlamaAttention.forward
    world = {**forward.__globals__}
    twin = type(forward)(forward.__code__, world)
    assert fingerprint(twin) == fingerprint(forward)
    world["apply_rotary_pos_emb"] = turned_the_other_way
    changed = type(forward)(forward.__code__, world)
    assert fingerprint(changed) not in ("", fingerprint(forward))


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_an_attention_function_is_given_what_the_model_gives_it(family, monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    given, sdpa = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(*args, **how):
        given.append((args, how))
        return sdpa(*args, **how)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attend)
    model = model_of(family, sliding_window=4, **WINDOW if family.startswith("Qwen") else {})
    inputs = words(some_argument=torch.ones(1))
    run(model, inputs)
    with kw.injected(model) as report:
        run(model, inputs)
        run(model, inputs)
    assert not report.problems
    for theirs, ours in zip(given[:LAYERS], given[-LAYERS:], strict=True):
        assert same(theirs, ours)
        assert theirs[1].keys() == ours[1].keys() >= {"scaling", "dropout", "some_argument"}
        assert plain(theirs) == plain(ours)
    windows = [how.get("sliding_window") for _, how in given[:LAYERS]]
    assert any(windows) == (family != "Llama")


def plain(call):
    """The arguments of a call that are not tensors."""
    args, how = call
    named = {**how, **{str(i): a for i, a in enumerate(args)}}
    return {name: a for name, a in named.items() if not isinstance(a, torch.Tensor)}


def test_a_padding_mask_counts():
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    model = model_of("Llama")
    check_exact(model, words(attention_mask=mask))
    with kw.injected(model):
        assert not same(run(model, words(attention_mask=mask)), run(model, words()))


@pytest.mark.parametrize("width", [16, 37])
def test_gate_and_up_of_odd_widths_in_layers_that_must_not_run_twice(width):
    """On a CPU, SiLU of a part of the joined product has other bits than of rows of its own. A
    layer with a hook inside is not compared as a whole, but site by site."""
    model = model_of("Qwen3", intermediate_size=width)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: None)
    inputs = words(1, 40, output_hidden_states=True)
    expected = run(model, inputs)
    with kw.injected(model):
        for _ in range(3):
            assert same(run(model, inputs), expected)


def test_one_sequence_and_one_position_for_all():
    check_exact(model_of("Qwen3", torch.bfloat16), words(batch=1))
    positions = torch.arange(7).flip(0)[None]
    check_exact(model_of("Qwen3", torch.bfloat16), words(position_ids=positions))


def test_a_mask_of_truth_values_is_made_into_numbers_once(monkeypatch):
    model = model_of("Llama", torch.bfloat16)
    given = words(attention_mask=torch.tensor([[1] * 7, [0] * 3 + [1] * 4]))
    with torch.no_grad():
        eager = model(**given).logits
        kw.inject(model)
        model(**given)
        seen, usual = [], F.scaled_dot_product_attention

        def attend(*args, attn_mask=None, **how):
            seen.append(attn_mask)
            return usual(*args, attn_mask=attn_mask, **how)

        monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
        model(**given)  # compares again, with the other attention
        seen.clear()
        assert torch.equal(model(**given).logits, eager)
    assert {mask.dtype for mask in seen} == {torch.bfloat16}
    assert len({id(mask) for mask in seen}) == 1


def test_a_mask_that_only_later_calls_have_is_compared(monkeypatch):
    """A mask of ones is no mask for transformers: what a layer is given depends on values."""
    model = model_of("Llama", torch.bfloat16)
    given = [
        words(attention_mask=torch.tensor([[1] * 7, [0] * hidden + [1] * (7 - hidden)]))
        for hidden in (0, 0, 3, 0, 3)
    ]
    eager = [run(model, g) for g in given]
    kw.inject(model)
    usual = attention.AttentionFusions._mask_numbers

    def wrong(self, *args):
        made = usual(self, *args)
        return None if made is None else made * 0

    monkeypatch.setattr(attention.AttentionFusions, "_mask_numbers", wrong)
    for g, want in zip(given, eager, strict=True):
        assert same(run(model, g), want)


@pytest.mark.parametrize("lowest", [-math.inf, -65504.0])
def test_tokens_that_see_nothing_are_as_in_eager(monkeypatch, lowest):
    """cuDNN's attention adds another number than PyTorch's others where a mask is False; a row
    that is False everywhere shows it, and need not be there at first sight."""
    usual = F.scaled_dot_product_attention

    def attend(query, *rest, attn_mask=None, **how):
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype).masked_fill(
                ~attn_mask, lowest
            )
        return usual(query, *rest, attn_mask=attn_mask, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    model = model_of("Llama", torch.bfloat16)
    last_hidden = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    first_hidden = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    check_calls(model, [words(attention_mask=m) for m in (last_hidden, first_hidden)])


def check_calls(model, inputs, **how):
    eager = [run(model, given) for given in inputs]
    with kw.injected(model, **how) as report:
        for given, want in zip(inputs, eager, strict=True):
            assert same(run(model, given), want)
    return report


def test_keys_and_values_are_not_copied_for_heads_that_share_them(monkeypatch):
    # the other kernels of PyTorch's on a CPU copy them, too, but in their own way
    everywhere = (*attention.READ_SHARED_HEADS, SDPBackend.MATH)
    monkeypatch.setattr(attention, "READ_SHARED_HEADS", everywhere)
    copied = []
    usual = sdpa_attention.repeat_kv
    monkeypatch.setattr(
        sdpa_attention, "repeat_kv", lambda *a: copied.append(1) or usual(*a), raising=True
    )
    model = model_of("Llama", torch.bfloat16)
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    given = words(attention_mask=torch.tensor([[1] * 7, [0] * 3 + [1] * 4]))
    eager = run(model, given)
    assert copied
    with kw.injected(model) as report:
        assert same(run(model, given), eager)
        copied.clear()
        assert same(run(model, given), eager)
        assert not copied
    assert fused_sites(report)["heads that share keys and values"] == LAYERS


def test_attention_without_copies_is_compared_at_every_length_of_a_cache(monkeypatch):
    """A verdict of a module is for any length of its cache; a kernel that has eager's bits at one
    may have others at the next."""
    usual = F.scaled_dot_product_attention
    model = model_of("Llama", torch.bfloat16)
    prompt = words(batch=2)
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    how = {"attention_mask": mask, "do_sample": False}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    # the first products of a process on a CPU may have other bits than the same ones later
    for n in (4, 12, 4):
        model.generate(prompt["input_ids"], max_new_tokens=n, **how)
    wanted = {n: model.generate(prompt["input_ids"], max_new_tokens=n, **how) for n in (4, 12)}

    def attend(query, key, value, *args, enable_gqa=False, **more):
        y = usual(query, key, value, *args, enable_gqa=enable_gqa, **more)
        return y + 1 if enable_gqa and key.shape[2] > 12 else y

    monkeypatch.setattr(attention, "torch_attends", lambda: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    kw.inject(model)
    for n in (4, 4, 12, 12, 4):
        got = model.generate(prompt["input_ids"], max_new_tokens=n, **how)
        assert torch.equal(got.sequences, wanted[n].sequences)
        assert all(map(torch.equal, got.logits, wanted[n].logits))
