"""`generate` with graphs runs ahead of the GPU by a token, and nobody notices."""

import copy

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, utils

import kernelwright as kw
from inject.language import model_of, words
from kernelwright.inject.graphs import generation

if not hasattr(utils, "DeferredStopCheck"):
    pytest.skip("this transformers reads after every token", allow_module_level=True)

NEW = 9
HOW = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
STATIC = {**HOW, "cache_implementation": "static", "disable_compile": True}


class Event:
    """There are no events on a CPU."""

    def __init__(self, **how):
        pass

    def record(self):
        pass

    synchronize = record


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(generation, "DEVICES", ("cpu",))


@pytest.fixture
def model():
    return model_of("Llama", torch.float32)


@pytest.fixture
def prompt():
    return words(batch=2)["input_ids"]


def deferred(model, prompt, **how):
    """(tokens, forwards) of `generate`, and whether it read one token late."""
    calls, late = [], []
    hook = model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    made = utils.DeferredStopCheck.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            utils.DeferredStopCheck,
            "__init__",
            lambda s, *a, **k: late.append(1) or made(s, *a, **k),
        )
        found = model.generate(prompt, **how)
    hook.remove()
    return found, len(calls), bool(late)


@pytest.mark.parametrize("how", [HOW, STATIC], ids=["grows", "static"])
def test_tokens_are_those_of_eager_whatever_ends_them(model, prompt, how):
    eager = model.generate(prompt, **how)
    ends = eager[:, prompt.shape[1] + 4].tolist()
    wanted, forwards, late = deferred(model, prompt, **how, eos_token_id=ends)
    assert not late
    with kw.injected(model, graphs=True):
        found, ahead, late = deferred(model, prompt, **how, eos_token_id=ends)
        assert late
        assert torch.equal(found, wanted)
        assert ahead == forwards + 1  # the token too many
        assert torch.equal(model.generate(prompt, **how), eager)
    assert not deferred(model, prompt, **how)[2]


def test_a_limit_of_tokens_is_no_token_late(model, prompt):
    _, forwards, _ = deferred(model, prompt, **HOW)
    with kw.injected(model, graphs=True):
        _, ahead, late = deferred(model, prompt, **HOW)
    assert late
    assert ahead == forwards == NEW


class CountsCalls(StoppingCriteria):
    calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.zeros(len(input_ids), dtype=torch.bool)


class OwnWarper(TemperatureLogitsWarper):
    pass


@pytest.mark.parametrize(
    "given",
    [
        {"stopping_criteria": StoppingCriteriaList([CountsCalls()])},
        {"logits_processor": LogitsProcessorList([OwnWarper(0.5)])},
        {"prefix_allowed_tokens_fn": lambda batch, tokens: list(range(128))},
        {"return_dict_in_generate": True},
        {"num_beams": 2},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_may_count_its_calls_is_called_as_in_eager(model, prompt, given):
    eager = model.generate(prompt, **HOW, **given)
    with kw.injected(model, graphs=True):
        found, _, late = deferred(model, prompt, **HOW, **given)
    assert not late
    tokens = [r if isinstance(r, torch.Tensor) else r.sequences for r in (eager, found)]
    assert torch.equal(*tokens)


def test_other_models_read_after_every_token(model, prompt):
    other = copy.deepcopy(model)
    with kw.injected(model, graphs=True):
        model.generate(prompt, **HOW)
        assert not deferred(other, prompt, **HOW)[2]
    with kw.injected(model):  # without graphs the host is not ahead of the GPU anyway
        assert not deferred(model, prompt, **HOW)[2]


def test_a_failed_prompt_leaves_nothing_behind(model, prompt):
    other = copy.deepcopy(model)
    with kw.injected(model, graphs=True):
        with pytest.raises(IndexError):
            model.generate(prompt + 10**6, **HOW)
        assert not deferred(other, prompt, **HOW)[2]


def test_a_copy_generates_and_nothing_is_left(model, prompt):
    eager = model.generate(prompt, **HOW)
    with kw.injected(model, graphs=True):
        assert torch.equal(copy.deepcopy(model).generate(prompt, **HOW), eager)
    names = (generation.PROCESSORS, generation.CRITERIA)
    assert not any(name in vars(model) for name in names)
