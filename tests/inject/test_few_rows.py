"""Decoding: the layers of one to eight rows by kernels that read each weight once."""

import pytest
import torch

import kernelwright as kw
from inject.language import model_of, words
from kernelwright.inject.verify import accuracy
from kernelwright.ops import few_rows

WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


@pytest.fixture
def calls(monkeypatch):
    """The calls of the two ops, which run on the CPU as they would on a GPU."""
    seen = []
    monkeypatch.setattr(few_rows, "problem", lambda x, weight, bias=None: None)
    for op in (few_rows.LINEAR_FEW_ROWS, few_rows.EIGHT_BIT_LINEAR_FEW_ROWS):
        monkeypatch.setattr(op, "run", _noted(seen, op))
    return seen


def _noted(seen, op):
    usual = op.run

    def run(*args):
        seen.append((op.name, tuple(args[1].shape), args[op.arguments.index("glu")]))
        return usual(*args)

    return run


def logits(model, **given):
    with torch.no_grad():
        return model(**words(**given)).logits


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_fused_reads_each_weight_of_a_layer_once(calls, family, rows):
    model = model_of(family, torch.bfloat16)
    given = {"batch": 1, "tokens": rows}
    eager = logits(model, **given)
    report = kw.inject(model, numerics="fused")
    logits(model, **given)
    calls.clear()
    near = logits(model, **given)
    assert accuracy.error(near, eager) < 2**-6
    layer = [((128, 64), False), ((64, 64), False), ((192, 64), True), ((64, 96), False)]
    assert [(shape, glu) for _, shape, glu in calls] == layer * 2
    assert "few rows" in str(report.to_dict())


def test_more_rows_and_the_exact_tier_keep_pytorchs_products(calls):
    model = model_of("Llama", torch.bfloat16)
    one, many = logits(model, batch=1, tokens=1), logits(model, batch=1, tokens=17)
    with kw.injected(model):
        assert torch.equal(logits(model, batch=1, tokens=1), one)
    with kw.injected(model, numerics="fused"):
        assert accuracy.error(logits(model, batch=1, tokens=17), many) < 2**-6
    assert not calls


def test_fp8_reads_the_weights_of_the_prompt_in_eight_bits(calls):
    model = model_of("Llama", torch.bfloat16, **WIDE)
    given = {"batch": 1, "tokens": 2}
    eager = logits(model, **given)
    kw.inject(model, numerics="fp8")
    before = logits(model, **given)  # as int8: nothing has asked for a GEMM yet
    assert accuracy.error(before, eager) < 0.018
    logits(model, batch=2, tokens=40)  # the prompt
    calls.clear()
    now = logits(model, **given)
    assert {name for name, _, _ in calls} == {"eight_bit_linear_few_rows"}
    assert [glu for _, _, glu in calls] == [False, False, True, False] * 2
    assert not torch.equal(now, before)
    assert accuracy.error(now, eager) < 0.074
    kw.restore(model)
    assert torch.equal(logits(model, **given), eager)


def test_gradients_and_hooks_keep_pytorchs_products(calls):
    model = model_of("Llama", torch.bfloat16)
    kw.inject(model, numerics="fused")
    model(**words(batch=1, tokens=1)).logits.sum().backward()
    assert not calls
    seen = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    logits(model, batch=1, tokens=1)
    assert seen
    shapes = [shape for _, shape, _ in calls]
    assert shapes.count((64, 96)) * 2 == shapes.count((192, 64))  # of the second layer alone


def test_a_kernel_that_is_off_in_fp8_is_not_used(calls, monkeypatch):
    usual = few_rows.EIGHT_BIT_LINEAR_FEW_ROWS.run
    monkeypatch.setattr(few_rows.EIGHT_BIT_LINEAR_FEW_ROWS, "run", lambda *a: usual(*a) * 1.01)
    model = model_of("Llama", torch.bfloat16, **WIDE)
    given = {"batch": 1, "tokens": 2}
    eager = logits(model, **given)
    kw.inject(model, numerics="fp8")
    logits(model, batch=2, tokens=40)
    with pytest.warns(UserWarning, match="the kernel for few rows of an fp8 layer is off"):
        logits(model, **given)
    calls.clear()
    assert accuracy.error(logits(model, **given), eager) < 0.074
    assert not calls
