"""Cross-entropy of 16-bit logits has the bits of F.cross_entropy(logits.float(), target)."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kernelwright as kw
from kernelwright.inject.training import cross_entropy

# vocabularies: the shortest with a kernel, Llama 2 and 3, Qwen, Gemma, and two whose last round of
# a block is short
CLASSES = [12288, 32000, 49160, 128256, 151936, 262144]
ROWS = [1, 7, 300]


def loss_and_gradient(function, logits, target, ignored, reduction, scale):
    leaf = logits.clone().requires_grad_()
    loss = function(leaf, target, ignored, reduction)
    (loss * scale).backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("classes", CLASSES)
def test_loss_and_gradient_are_eagers(classes, rows, dtype):
    generator = torch.Generator("cuda").manual_seed(classes + rows)
    draw = {"generator": generator, "device": "cuda"}
    target = torch.randint(classes, (rows,), **draw)
    target[-1] = classes - 1
    some = target.clone()
    some[1::3] = -100
    for spread, shift in ((1.0, 0.0), (12.0, -3.0)):
        logits = (torch.randn(rows, classes, **draw) * spread + shift).to(dtype)
        assert cross_entropy.why_not(logits) is None
        for labels, ignored in ((target, -100), (some, -100), (target, int(target[0]))):
            for reduction, scale in (("mean", 1.0), ("sum", 0.37)):
                given = logits, labels, ignored, reduction, scale
                loss, gradient = loss_and_gradient(cross_entropy.cross_entropy, *given)
                want, d_want = loss_and_gradient(cross_entropy.eager, *given)
                # a mean of no row is NaN
                assert torch.equal(loss.nan_to_num(1e9), want.nan_to_num(1e9))
                assert torch.equal(gradient.nan_to_num(1e9), d_want.nan_to_num(1e9))


def test_logits_of_minus_infinity_are_as_in_eager():
    logits = torch.randn(6, 32000, device="cuda").bfloat16()
    logits[0, 100:] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    logits[3, 6] = torch.nan
    target = torch.tensor([3, 4, 5, 6, 7, 31999], device="cuda")
    for reduction in ("mean", "sum"):
        given = logits, target, -100, reduction, 1.0
        found = loss_and_gradient(cross_entropy.cross_entropy, *given)
        want = loss_and_gradient(cross_entropy.eager, *given)
        for ours, theirs in zip(found, want, strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_rows_that_are_far_apart():
    """Logits of more than 2^31 elements."""
    rows, classes = 17000, 128256
    logits = torch.empty(rows, classes, dtype=torch.bfloat16, device="cuda")
    logits.normal_(generator=torch.Generator("cuda").manual_seed(5))
    target = torch.arange(rows, device="cuda") * 7
    numbers = cross_entropy.row_numbers(logits, target, -100)
    last = slice(rows - 8, rows)
    alone = cross_entropy.row_numbers(logits[last].clone(), target[last].clone(), -100)
    assert torch.equal(numbers[:, last], alone)
    gradient = torch.full((rows, 1), -0.5, device="cuda")
    found = cross_entropy.gradient_of_logits(logits, target, -100, numbers, gradient)
    want = cross_entropy.gradient_of_logits(
        logits[last].clone(), target[last].clone(), -100, alone.contiguous(), gradient[:8]
    )
    assert torch.equal(found[last], want)


@pytest.mark.parametrize("numerics", ["exact", "fused"])
def test_a_language_model_trains_with_it(numerics):
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=32000, num_attention_heads=4, **sizes)
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    ids = torch.randint(32000, (2, 150), device="cuda")
    found = []
    for injected in (False, True):
        report = kw.inject(model, numerics=numerics) if injected else None
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append((loss.detach(), model.lm_head.weight.grad.clone()))
    assert "ForCausalLMLoss, while gradients are recorded: cross-entropy" in str(report)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
