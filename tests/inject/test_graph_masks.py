"""Graphs of transformers: each call is masked as it would be without a graph."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModel, masking_utils
from transformers.utils import import_utils

import kernelwright as kw
from kernelwright.inject.graphs import graphs as graphs_module
from kernelwright.inject.graphs import mask_decisions
from kernelwright.inject.graphs.capture import DRAWS
from kernelwright.inject.graphs.graphs import capturing

from .harness import run, same
from .language import model_of, words
from .stand_in import Again, CpuGraphs, alignment_of_new_memory, called, data  # noqa: F401

FAMILIES = {"Llama": {}, "Mistral": {"sliding_window": 64}, "Qwen3": {}}
OTHER_MASK = "its inputs need another attention mask than those at its capture"


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Let transformers see a capture, and attention give other bits with a mask than without."""
    plain = functional.scaled_dot_product_attention

    def attention(*args, attn_mask=None, **kwargs):
        result = plain(*args, attn_mask=attn_mask, **kwargs)
        return result if attn_mask is None else result * 1.01

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(
        import_utils, "is_cuda_stream_capturing", lambda: capturing() or Again.replaying
    )
    monkeypatch.setattr(graphs_module, "Graphs", CpuGraphs)


def prompt(seed, tokens=7, **more):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 128, (2, tokens), generator=generator)
    return {"input_ids": ids, "use_cache": False, **more}


def prompts(count, **more):
    return [prompt(seed, **more) for seed in range(count)]


def check(model, inputs):
    """Check eager's bits for every call; returns the number of graphs and replays, and why calls
    ran without one."""
    expected = [run(model, given) for given in inputs]
    with kw.injected(model, graphs=True) as report:
        for given, wanted in zip(inputs, expected, strict=True):
            assert same(run(model, given), wanted)
        (graphs,) = report.graphs
        return (graphs.captured, graphs.counts[1]), graphs.reasons


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_without_a_mask_is_replayed(family):
    model = model_of(family, **FAMILIES[family])
    assert check(model, prompts(4)) == ((1, 3), {})


def test_a_window_that_is_shorter_than_the_text_is_replayed():
    assert check(model_of("Mistral", sliding_window=4), prompts(4)) == ((1, 3), {})


def test_embeddings_in_place_of_words_are_replayed():
    model = model_of("Llama")
    inputs = [
        {"inputs_embeds": data(seed, 2, 7, model.config.hidden_size), "use_cache": False}
        for seed in range(4)
    ]
    assert check(model, inputs) == ((1, 3), {})


def test_without_the_decisions_there_would_be_no_graph(monkeypatch):
    monkeypatch.setattr(mask_decisions, "DECIDERS", ())
    (captured, _), reasons = check(model_of("Llama"), prompts(4))
    assert captured == 0
    assert reasons == {"its graph gives other bits than the plain forward": 3}


PADDED = [torch.tensor([[0] * n + [1] * (7 - n), [1] * 7]) for n in range(4)]
WHOLE = PADDED[0]
POSITIONS = {
    "one": torch.arange(7).expand(2, 7).contiguous(),
    "two": torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2),
    "three": torch.tensor([[0, 1, 0, 1, 0, 1, 2]] * 2),
}


@pytest.mark.parametrize(
    ("first", "then"),
    [(PADDED[1], [PADDED[2], WHOLE, PADDED[3]]), (WHOLE, [WHOLE, PADDED[1], WHOLE])],
    ids=["padded", "whole"],
)
def test_a_graph_serves_the_prompts_that_are_masked_as_its_own(first, then):
    inputs = [prompt(i, attention_mask=m) for i, m in enumerate([first, first, *then])]
    (captured, replayed), reasons = check(model_of("Llama"), inputs)
    assert (captured, replayed) == (1, 4)
    assert reasons == {OTHER_MASK: 1}


@pytest.mark.parametrize(("first", "same_way"), [("one", "one"), ("two", "three")])
def test_packed_sequences_are_kept_apart_whatever_came_before(first, same_way):
    other = "two" if first == "one" else "one"
    order = (first, first, same_way, other, same_way)
    inputs = [prompt(i, position_ids=POSITIONS[name]) for i, name in enumerate(order)]
    (captured, replayed), reasons = check(model_of("Llama"), inputs)
    assert (captured, replayed) == (1, 4)
    assert reasons == {OTHER_MASK: 1}


@pytest.mark.parametrize(
    ("given", "waits"),
    [
        ({}, False),
        ({"position_ids": torch.arange(7)[None]}, True),
        ({"attention_mask": torch.ones(2, 7, dtype=torch.long)}, True),
    ],
    ids=["nothing", "positions", "mask"],
)
def test_a_replay_waits_for_the_gpu_only_if_inputs_may_need_another_mask(given, waits):
    """Positions that the model counts itself are the same at every replay."""
    model = model_of("Llama")
    with kw.injected(model, graphs=True) as report:
        for inputs in prompts(4, **given):
            run(model, inputs)
        (known,) = report.graphs[0]._models.values()
        (graph,) = known.graphs.values()
        assert graph._decisions.depend_on_values == waits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_made_behind_the_graph_and_need_no_copy(family):
    model = model_of(family, **FAMILIES[family])
    logits = []
    model.lm_head.register_forward_hook(lambda layer, given, result: logits.append(result))
    inputs = prompts(4)
    expected = [run(model, given) for given in inputs]
    logits.clear()
    with kw.injected(model, graphs=True) as report:
        results = [run(model, given) for given in inputs]
    assert same(results, expected)
    assert report.graphs[0].captured == 1
    assert [r.logits.data_ptr() for r in results] == [t.data_ptr() for t in logits[-4:]]


def test_a_cache_among_the_results_runs_without_a_graph():
    model, inputs = model_of("Llama"), words(use_cache=True)
    expected = run(model, inputs)
    with kw.injected(model, graphs=True) as report:
        results = [run(model, inputs) for _ in range(4)]
    assert all(torch.equal(r.logits, expected.logits) for r in results)
    assert {r.past_key_values.get_seq_length() for r in results} == {7}
    assert len({id(r.past_key_values) for r in results}) == 4
    assert report.graphs[0].captured == 0
    assert report.graphs[0].reasons == {"an output of type DynamicCache": 3}


def test_nothing_is_left_on_transformers_and_other_threads_see_its_own():
    before = {name: getattr(masking_utils, name) for name in mask_decisions.DECIDERS}
    decisions, found = mask_decisions.Decisions(), []

    def decide():
        return masking_utils.find_packed_sequence_indices(POSITIONS["two"])

    with decisions.running():
        assert all(getattr(masking_utils, n) is not f for n, f in before.items())
        elsewhere = threading.Thread(target=lambda: found.append(decide()))
        elsewhere.start()
        elsewhere.join()
    assert found[0].tolist() == [[0, 0, 0, 1, 1, 1, 1]] * 2
    with pytest.raises(KeyError), decisions.running():
        raise KeyError
    assert {name: getattr(masking_utils, name) for name in mask_decisions.DECIDERS} == before
    # the decisions of the other thread must not be repeated here
    decisions.collecting = False
    with pytest.raises(mask_decisions.Refusal), decisions.running():
        decide()


def test_of_decisions_that_are_not_the_watched_ones_none_is_taken_for_constant():
    given = torch.arange(4)

    def first(positions):
        return bool((positions == 0).any())

    def second(positions):
        return int(positions.max())

    decisions = mask_decisions.Decisions()
    with decisions.running():
        found = [mask_decisions.decided(f, given) for f in (first, second)]
    decisions.collecting = False
    decisions.find_constant(lambda: mask_decisions.decided(second, torch.arange(4)))
    given += 1
    with decisions.running():
        assert mask_decisions.decided(first, given) is False
        assert mask_decisions.decided(second, given) == 4
    assert found == [True, 3]


def test_random_numbers_are_drawn_as_often_as_without_a_graph():
    class Draws(nn.Module):
        def forward(self, x, positions):
            packed = masking_utils.find_packed_sequence_indices(positions)
            return x + torch.rand_like(x) * (1 if packed is None else 2)

    module, graphs = Draws().eval(), CpuGraphs()
    torch.manual_seed(0)
    expected = [module(data(0, 2, 7), POSITIONS["one"]) for _ in range(4)]
    torch.manual_seed(0)
    for plain in expected:
        assert torch.equal(called(graphs, module, data(0, 2, 7), POSITIONS["one"]), plain)
    assert graphs.reasons == {DRAWS: 4}


@pytest.fixture
def clip():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = CLIPTextConfig(vocab_size=128, num_hidden_layers=2, eos_token_id=127, **sizes)
    return CLIPTextModel(config).eval()


def test_hidden_states_are_results_like_any_other(clip):
    inputs = [
        {"input_ids": given["input_ids"], "output_hidden_states": True} for given in prompts(4)
    ]
    assert check(clip, inputs) == ((1, 3), {})


def test_hooks_that_come_with_the_first_call_do_not_prevent_a_graph(clip):
    inputs = [
        {"input_ids": given["input_ids"], "output_hidden_states": True} for given in prompts(4)
    ]
    with kw.injected(clip, graphs=True) as report:
        results = [run(clip, given) for given in inputs]
        assert report.graphs[0].captured == 1
    assert all(same(r, run(clip, given)) for r, given in zip(results, inputs, strict=True))


def test_a_hook_beside_those_of_transformers_is_an_obstacle(clip):
    given = {"input_ids": prompt(0)["input_ids"], "output_hidden_states": True}
    expected = run(clip, given)
    with kw.injected(clip, graphs=True) as report:
        for _ in range(3):
            run(clip, given)
        assert report.graphs[0].captured == 1
        clip.encoder.layers[0].register_forward_hook(lambda m, args, out: out * 2)
        changed = run(clip, given)
        assert report.graphs[0].captured == 0
    assert not same(changed, expected)
    assert "a hook on CLIPEncoderLayer" in report.graphs[0].reasons


def test_layers_inside_a_model_that_collects_their_outputs_run_without_a_graph(clip):
    given = {"input_ids": prompt(0)["input_ids"], "output_hidden_states": True}
    expected = run(clip, given)
    with kw.injected(clip.encoder, graphs=True) as report:
        results = [run(clip, given) for _ in range(4)]
    assert all(same(result, expected) for result in results)
    assert report.graphs[0].reasons == {"inside a model that collects what its layers return": 4}
