"""Layers that hand each other keys and values in a dictionary, as those of Gemma 4 and Gemma 3n,
run as programs: what they read there is an input of the recording, what they leave a result."""

import copy
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from everything import share
from torch import nn

import kernelwright as kw
from inject.harness import same
from inject.language import model_of
from inject.small_models import LANGUAGE
from inject.test_cached_blocks import STATIC, generated

pytest.importorskip("transformers")
TYPES = ["sliding_attention", "full_attention"] * 2
SMALL = {
    **LANGUAGE["Gemma4"],
    "num_hidden_layers": 4,
    "layer_types": TYPES,
}
# Gemma 4 has keys and values in each layer, or fewer and inputs of each layer, or experts
KINDS = {
    "none share": SMALL,
    "two share": {
        **SMALL,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 128,
    },
    "experts": {
        **SMALL,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}
WAYS = {
    "growing": {},
    "static": STATIC,
    "beams": {"num_beams": 2},
    "no cache": {"use_cache": False},
}


def gemma(kind="two share", dtype=torch.float32):
    return model_of("Gemma4", dtype, **KINDS[kind])


def answered(model, way):
    if way != "no cache":
        return generated(model, 2, **WAYS[way])
    with torch.no_grad():
        return [model(torch.randint(3, 100, (2, n)), use_cache=False).logits for n in (5, 9, 9)]


CASES = [(k, w) for w in WAYS for k in KINDS]


@pytest.mark.parametrize(("kind", "way"), [("two share", "growing"), *share(CASES, 5)])
def test_what_is_generated_has_the_bits_of_eager(kind, way):
    model = gemma(kind)
    torch.manual_seed(3)
    want = answered(model, way)
    with kw.injected(model) as report:
        for _ in range(3):
            torch.manual_seed(3)
            assert same(answered(model, way), want)
    assert not report.problems
    assert all(line.kernels for line in report.blocks)
    assert any(f.equal for f in report.findings)


def test_in_other_tiers_it_runs_too():
    model = gemma(dtype=torch.bfloat16)
    want = answered(model, "no cache")
    with kw.injected(model, numerics="fused") as report:
        got = [answered(model, "no cache") for _ in range(3)][-1]
    assert not report.problems
    for ours, eager in zip(got, want, strict=True):
        assert ours.shape == eager.shape


def test_what_layers_leave_is_handed_to_who_asks_for_it():
    model, words = gemma().model, torch.randint(3, 100, (2, 7))
    asked = {"return_shared_kv_states": True, "use_cache": False}
    with torch.no_grad():
        want = model(words, **asked).shared_kv_states
        with kw.injected(model):
            for _ in range(3):
                got = model(words, **asked).shared_kv_states
                assert isinstance(got, UserDict)
                assert same(dict(got), dict(want))


class Handing(nn.Module):
    """A block that takes what the block before has left, and leaves something itself."""

    def __init__(self, use):
        super().__init__()
        self.norm, self.after, self.use = nn.LayerNorm(16), nn.LayerNorm(16), use
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, states):
        y = self.norm(x) * 2 + 1
        y = x + self.after(self.down(F.silu(self.gate(y)) * self.up(y)))
        # by name: what a function of another place does is not seen in its code
        return y + USES[self.use](states, y) * 0.5


class Stack(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.layers = nn.ModuleList(Handing(use) for _ in range(3))

    def forward(self, x, states=None):
        states = UserDict() if states is None else states
        for layer in self.layers:
            x = layer(x, states)
        return x


def leave_and_take(states, y):
    before = y
    if "rows" in states:
        before = states["rows"]
    states["rows"] = y * 2
    return before


def get(states, y):
    states.data["rows"] = y
    return states.get("none", y)


def leave_a_number(states, y):
    states["number"] = 3
    return y


def count(states, y):
    states["rows"] = y
    return y * len(states)


def write_to_what_is_there(states, y):
    if "rows" in states:
        states["rows"].add_(1)
    else:
        states["rows"] = y.clone()
    return states["rows"]


USES = {f.__name__: f for f in (leave_and_take, get, leave_a_number, count, write_to_what_is_there)}


@pytest.mark.parametrize("use", USES)
def test_blocks_that_do_odd_things_with_it_keep_their_bits(use):
    torch.manual_seed(0)
    model = Stack(use).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        want = model(x)
        with kw.injected(model) as report:
            for _ in range(4):
                assert same(model(x), want)
        assert not report.problems
    assert {line.kind for line in report.blocks} == {"Handing"}
    refused = {line.why for line in report.blocks if not line.kernels}
    assert bool(refused) == (use != "leave_and_take"), refused


def test_states_of_the_caller_are_written_to_once():
    torch.manual_seed(0)
    model, x = Stack("leave_and_take").eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        for _ in range(2):
            eager, ours = UserDict(rows=torch.ones(2, 5, 16)), UserDict(rows=torch.ones(2, 5, 16))
            want = model(x, eager)
            with kw.injected(model):
                for _ in range(3):
                    ours["rows"] = torch.ones(2, 5, 16)
                    assert same(model(x, ours), want)
                    assert same(dict(ours), dict(eager))


def test_another_layout_of_what_is_shared_is_another_recording():
    torch.manual_seed(0)
    model, x = Stack("leave_and_take").eval(), torch.randn(2, 5, 16)
    eager = copy.deepcopy(model)
    with torch.no_grad(), kw.injected(model):
        for shared in (torch.ones(2, 5, 16), torch.ones(16), torch.ones(5, 1), torch.ones(16)):
            want = eager(x, UserDict(rows=shared))
            for _ in range(3):
                assert same(model(x, UserDict(rows=shared)), want)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_trained_layers_that_share_nothing_run_as_programs(checkpointing):
    """Checkpointed, a layer finds other states when it runs again than it did at first."""
    model = gemma("none share").train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    words = torch.randint(3, 100, (2, 9))

    def gradients():
        model.zero_grad()
        loss = model(input_ids=words, labels=words, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    want = gradients()
    with kw.injected(model) as report:
        for _ in range(2):
            assert same(gradients(), want)
    assert "backward" in str(report)
    assert "it reads or writes what layers share" in " ".join(str(report).split())
