"""The loss of transformers' language models is read from 16-bit logits, with eager's bits."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

import kernelwright as kw
from inject.trained import differing
from kernelwright.backends.cuda import compile_cubin
from kernelwright.inject.training import cross_entropy
from kernelwright.inject.training.causal_lm_loss import CausalLMLoss

VOCABULARY = 64


@pytest.fixture
def kernels(monkeypatch):
    """PyTorch's ops in place of the kernels: no GPU is here, and what is tested is all around."""
    ran = []

    def row_numbers(logits, target, ignored):
        ran.append("forward")
        log_probs = F.log_softmax(logits.float(), 1)
        picked = log_probs.gather(1, target.clamp(min=0)[:, None])[:, 0]
        picked = torch.where(target == ignored, 0.0, picked)
        return torch.stack([logits.float().amax(1), torch.zeros_like(picked), picked])

    def gradient_of_logits(logits, target, ignored, numbers, gradient):
        ran.append("backward")
        log_probs = F.log_softmax(logits.float(), 1)
        given = torch.zeros_like(log_probs).scatter_(1, target.clamp(min=0)[:, None], gradient)
        data = torch.ops.aten._log_softmax_backward_data
        return data(given, log_probs, 1, torch.float32).to(logits.dtype)

    monkeypatch.setattr(cross_entropy, "row_numbers", row_numbers)
    monkeypatch.setattr(cross_entropy, "gradient_of_logits", gradient_of_logits)
    monkeypatch.setattr(cross_entropy, "why_not", lambda logits: None)
    return ran


def language_model():
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)
    return LlamaForCausalLM(config).to(torch.bfloat16).train()


IDS = torch.arange(24).view(2, 12) * 7 % VOCABULARY
SOME = IDS.masked_fill(IDS % 3 == 0, -100)
GIVEN = [
    {"labels": IDS},
    {"labels": SOME},
    {"labels": SOME, "num_items_in_batch": torch.tensor(5)},
    {"labels": SOME, "num_items_in_batch": 7},
    {"labels": SOME, "shift_labels": IDS.roll(1, 1)},
]


def gradients(model, **given):
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=IDS, use_cache=False, **given).loss
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters()} | {"loss": loss.detach()}


@pytest.mark.parametrize("given", GIVEN)
def test_loss_and_gradients_are_eagers(given, kernels):
    eager, ours = language_model(), language_model()
    report = kw.inject(ours)
    for _ in range(2):
        assert differing(gradients(ours, **given), gradients(eager, **given)) == []
    assert kernels.count("forward") > 2
    assert kernels.count("backward") > 2
    assert "ForCausalLMLoss, while gradients are recorded: cross-entropy" in str(report)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_loss_without_gradients_is_eagers(without, kernels):
    eager, ours = language_model(), language_model()
    kw.inject(ours)
    with without():
        found = [m(input_ids=IDS, labels=SOME).loss for m in (eager, ours)]
    assert torch.equal(*found)
    assert "forward" in kernels


def test_a_compiled_model_has_transformers_own(kernels):
    eager, ours = language_model(), language_model()
    kw.inject(ours)
    compiled = torch.compile(ours, backend="eager")
    found = compiled(input_ids=IDS, labels=SOME, use_cache=False).loss
    assert torch.equal(found, eager(input_ids=IDS, labels=SOME, use_cache=False).loss)
    assert kernels == []


def test_without_memory_to_compare_eager_runs(kernels, monkeypatch):
    def fails(*given):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(cross_entropy, "row_numbers", fails)
    eager, ours = language_model(), language_model()
    report = kw.inject(ours)
    assert differing(gradients(ours, labels=IDS), gradients(eager, labels=IDS)) == []
    assert "not enough memory to compare" in str(report)


def test_second_derivatives_are_eagers(kernels):
    found = []
    for injected in (False, True):
        model = language_model()
        if injected:
            kw.inject(model, skip="LlamaDecoderLayer")
        head = model.lm_head.weight
        loss = model(input_ids=IDS, labels=IDS).loss
        (first,) = torch.autograd.grad(loss, head, create_graph=True)
        found += [torch.autograd.grad(first.float().square().sum(), head)[0]]
    assert torch.equal(*found)
    assert "forward" in kernels


def test_other_bits_are_noticed_and_eager_runs(kernels, monkeypatch):
    eager, ours = language_model(), language_model()
    usual = cross_entropy.gradient_of_logits
    monkeypatch.setattr(cross_entropy, "gradient_of_logits", lambda *given: usual(*given) * 2)
    report = kw.inject(ours)
    assert differing(gradients(ours, labels=IDS), gradients(eager, labels=IDS)) == []
    assert "the gradient of the logits has other bits" in str(report)
    count = len(kernels)
    gradients(ours, labels=IDS)
    assert len(kernels) == count


def test_logits_without_a_kernel_run_eager_and_say_so():
    eager, ours = language_model(), language_model()
    report = kw.inject(ours)
    assert differing(gradients(ours, labels=IDS), gradients(eager, labels=IDS)) == []
    assert "ForCausalLMLoss, while gradients are recorded: runs as without injection" in str(report)


def test_restore_takes_it_away():
    model = language_model()
    before = set(vars(model))
    kw.inject(model)
    assert isinstance(model.loss_function, CausalLMLoss)
    kw.restore(model)
    assert model.loss_function is ForCausalLMLoss
    assert set(vars(model)) == before
    with kw.injected(model):
        assert isinstance(model.loss_function, CausalLMLoss)
    assert model.loss_function is ForCausalLMLoss


def test_a_loss_of_the_user_stays():
    before, after = language_model(), language_model()

    def own(*args, **kwargs):
        return ForCausalLMLoss(*args, **kwargs) * 2

    before.loss_function = own
    for model in (before, after):
        kw.inject(model)
    after.loss_function = own
    for model in (before, after):
        assert model.loss_function is own
        kw.restore(model)
        assert model.loss_function is own


def test_only_what_is_named_is_injected():
    model = language_model()
    kw.inject(model, only="LlamaAttention")
    assert model.loss_function is ForCausalLMLoss


def test_copies_and_pickles(kernels):
    eager, ours = language_model(), language_model()
    kw.inject(ours)
    copied = copy.deepcopy(ours)
    assert pickle.loads(pickle.dumps(ours.loss_function)) is ForCausalLMLoss
    kw.restore(ours)
    want = gradients(eager, labels=IDS)
    assert differing(gradients(copied, labels=IDS), want) == []
    assert differing(gradients(ours, labels=IDS), want) == []


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", ["", "_backward"])
def test_the_kernels_compile(which, dtype, arch):
    launch = cross_entropy.launch_of(which, dtype, 3, 32000, 32000, -100)
    assert compile_cubin(launch.code, arch)
