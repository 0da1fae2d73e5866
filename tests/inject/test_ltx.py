"""LTX-Video: every fusion site is used, and the bits are eager's."""

import pytest
import torch

import kernelwright as kw
from inject.harness import check_exact, check_fused, fused_sites, programs_of, run, same
from kernelwright import models
from kernelwright.inject.reuse.rope_tables import Tables


def ltx(dtype=torch.float32, **size):
    build = {"tiny": True, "dtype": dtype}
    return models.build("ltx-video", **build), models.inputs("ltx-video", **build, **size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_exact_gives_the_bits_of_eager(dtype):
    model, inputs = ltx(dtype)
    blocks = len(model.transformer_blocks)
    report = check_exact(model, inputs)
    assert fused_sites(report) == {
        "norm + modulate": 1,
        "QK-norm + RoPE": blocks,
        "gate + residual": blocks + 1,
        "residual + norm + modulate": blocks,
        "gate + residual + norm + modulate": blocks - 1,
        "norm": 1 + 2 * blocks,  # of query and key without rotation
        "GELU": blocks,
    }


def test_fused_errs_no_more_than_eager():
    model, inputs = ltx(torch.bfloat16)
    sites = fused_sites(check_fused(model, inputs))
    assert sites["linear + GELU"] == len(model.transformer_blocks)


def for_every_token(inputs):
    batch, tokens = inputs["hidden_states"].shape[:2]
    return {**inputs, "timestep": torch.rand(batch, tokens) * 1000}


PROGRAMS = {"LTXVideoTransformerBlock"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_its_recipe_the_bits_are_the_same(dtype):
    model, inputs = ltx(dtype)
    report = check_exact(model, inputs, recipes=False)
    assert set(programs_of(report)[0]) == PROGRAMS
    whole = {**inputs, "encoder_attention_mask": torch.ones_like(inputs["encoder_attention_mask"])}
    other = models.inputs("ltx-video", tiny=True, dtype=dtype, height=96, width=128)
    cases = whole, for_every_token(inputs), other
    expected = [run(model, given) for given in cases]
    assert not same(expected[0], run(model, inputs))
    with kw.injected(model, recipes=False) as report:
        for given, wanted in zip(cases, expected, strict=True):
            assert all(same(run(model, given), wanted) for _ in range(2))
    assert not report.problems


def test_without_its_recipe_fused_errs_no_more_than_eager():
    report = check_fused(*ltx(torch.bfloat16), recipes=False)
    assert set(programs_of(report)[0]) == PROGRAMS


def test_a_timestep_for_every_token():
    """Image-to-video gives each token its own modulation: temb is [B, S, ...]. Programs add the
    table of a block to it where they use it."""
    model, inputs = ltx(torch.bfloat16)
    inputs = for_every_token(inputs)
    programs, _ = programs_of(check_exact(model, inputs))
    assert set(programs) == PROGRAMS
    check_fused(model, inputs)


def test_one_timestep_and_one_for_every_token_in_turn():
    model, inputs = ltx(torch.bfloat16)
    cases = 2 * [inputs, for_every_token(inputs)]
    expected = [run(model, given) for given in cases]
    with kw.injected(model) as report:
        for given, wanted in zip(cases, expected, strict=True):
            assert same(run(model, given), wanted)
    assert not report.problems


def test_a_part_to_be_left_as_it_is_in_a_block_whose_tokens_have_timesteps():
    model, inputs = ltx(torch.bfloat16)
    report = check_exact(model, for_every_token(inputs), skip="*.attn2")
    programs, others = programs_of(report)
    assert not programs
    assert others["QK-norm + RoPE"] == len(model.transformer_blocks)


def test_a_hook_in_a_block_whose_tokens_have_timesteps():
    """No program can be made of it: its recipe is used, one kernel after the other."""
    model, inputs = ltx(torch.bfloat16)
    inputs, calls = for_every_token(inputs), []
    for block in model.transformer_blocks:
        block.attn1.to_q.register_forward_hook(lambda *_: calls.append(1))
        block.norm2.register_forward_hook(lambda *_: calls.append(2))
    expected = run(model, inputs)
    seen = list(calls)
    with kw.injected(model) as report:
        for _ in range(3):
            calls.clear()
            assert same(run(model, inputs), expected)
            assert calls == seen
    assert fused_sites(report)["QK-norm + RoPE"] == len(model.transformer_blocks)


def test_one_prompt_without_guidance():
    check_exact(*ltx(torch.bfloat16, batch=1))


def test_the_padding_mask_counts():
    model, inputs = ltx()
    with kw.injected(model):
        masked = run(model, inputs)
        inputs["encoder_attention_mask"] = torch.ones_like(inputs["encoder_attention_mask"])
        assert not same(masked, run(model, inputs))


def test_another_resolution_is_checked_anew_when_it_comes_again():
    model, inputs = ltx()
    with kw.injected(model) as report:
        run(model, inputs)
        seen = len(report.findings)
        other = models.inputs("ltx-video", tiny=True, dtype=torch.float32, height=96, width=128)
        result = run(model, other)
        assert len(report.findings) == seen
        assert "ran as they are at a further shape" in str(report)
        assert same(result, run(model, other))
        assert "further shape" not in str(report)
        text = 1  # its projection sees the same input again
        assert len(report.findings) == 2 * seen - text
    assert same(result, run(model, other))


def test_rotary_tables_are_made_once_and_are_never_stale(monkeypatch):
    model, inputs = ltx()
    made, remembered = [], Tables.cached

    def counted(self, numbers, make):
        return remembered(self, numbers, lambda: made.append(1) or make())

    monkeypatch.setattr(Tables, "cached", counted)
    with kw.injected(model) as report:
        expected = run(model, inputs)
        made.clear()
        assert same(run(model, inputs), expected)
        assert not made
        for _ in range(
            3
        ):  # the last of these, which come otherwise than the model's, are kept ones
            tables = model.rope(inputs["hidden_states"], *(inputs[k] for k in SIZES))
        tables[0].zero_()
        assert same(run(model, inputs), expected)
        assert len(made) == 1
        model.rope.theta = 5000.0
        changed = run(model, inputs)
        assert not same(changed, expected)
        inputs["rope_interpolation_scale"] = (0.1, 32, 32)
        assert not same(run(model, inputs), changed)
    assert not report.problems
    inputs["rope_interpolation_scale"] = (8 / 25, 32, 32)
    assert same(run(model, inputs), changed)


SIZES = ("num_frames", "height", "width", "rope_interpolation_scale")


def test_a_processor_of_ones_own_is_called():
    model, inputs = ltx()
    original = type(model.transformer_blocks[0].attn1.processor)

    class Louder(original):
        def __call__(self, *args, **kwargs):
            return 2 * super().__call__(*args, **kwargs)

    model.transformer_blocks[0].attn1.set_processor(Louder())
    check_exact(model, inputs)


def test_full_size_counts_what_the_seed_counted():
    import ltx_kernels

    pipe = type("Pipe", (), {})()
    pipe.components = {"transformer": models.build("ltx-video", device="meta")}
    assert ltx_kernels.inject_optimized_kernels(pipe) == {
        "attention_processors": 56,
        "rmsnorm_modules": 168,
    }
    assert ltx_kernels.patch_rmsnorm_modules(pipe.components["transformer"]) == 168


def test_the_processor_of_the_seed_gives_the_same_bits():
    from ltx_kernels import OptimizedLTXVideoAttnProcessor

    model, inputs = ltx(torch.bfloat16)
    expected = run(model, inputs)
    for block in model.transformer_blocks:
        for attn in (block.attn1, block.attn2):
            attn.set_processor(OptimizedLTXVideoAttnProcessor())
    assert same(run(model, inputs), expected)
