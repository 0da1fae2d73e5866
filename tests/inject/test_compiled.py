"""Injection under torch.compile: the same fusions, decided at run time."""

import copy
from collections import Counter

import pytest
import torch
from everything import share
from torch import nn

import kernelwright as kw
from inject.harness import run, same
from inject.heads import WIDTH, Heads, is_packed, rows
from inject.stand_in import CpuGraphs
from kernelwright import models
from kernelwright.backends.torch_internals import mark_constant
from kernelwright.inject.fusions import QKV, Fusions
from kernelwright.inject.graphs import graphs as graphs_module
from kernelwright.inject.reuse import (
    compiled_prompt_values,
    packed_gemm,
    packed_weights,
    rope_tables,
)
from kernelwright.inject.runtime import model_run
from kernelwright.inject.runtime.sites import eagerly
from kernelwright.inject.state.tensor_samples import TensorSamples


class Traces(list):
    """A backend that runs graphs unchanged and counts the calls in each."""

    def __call__(self, graph, inputs):
        calls = (n.target for n in graph.graph.nodes if n.op.startswith("call_"))
        self.append(Counter(c if isinstance(c, str) else c.__name__ for c in calls))
        return graph


@pytest.fixture
def traces():
    torch._dynamo.reset()
    yield Traces()
    torch._dynamo.reset()


def compiled(heads, backend, numerics="exact"):
    fuse = Fusions(numerics, None, {})

    @torch.no_grad()
    def joined(x):
        return torch.cat(fuse.projections(QKV, x, heads.layers), -1)

    return torch.compile(joined, backend=backend, fullgraph=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("numerics", ["exact", "fused"])
def test_layers_of_one_input_are_one_op_and_get_packed(traces, numerics, bias):
    heads, x = Heads(bias), rows()
    expected = heads(x)
    joined = compiled(heads, traces, numerics)
    assert torch.equal(joined(x), expected)
    assert is_packed(heads)
    assert torch.equal(joined(x), expected)
    assert [(t["projections.default"], t["linear"]) for t in traces] == [(1, 0)]


def test_one_who_looks_at_the_weights_while_it_compiles_does_not_keep_them_apart(traces):
    heads, x = Heads(), rows()
    expected = heads(x)
    joined = compiled(heads, "aot_eager")
    assert all(torch.equal(joined(x), expected) for _ in range(packed_weights.TRIES))
    assert is_packed(heads)


def written(heads):
    with torch.no_grad():
        heads.q.weight.mul_(2)


def merged(heads):
    heads.k.weight.data += 1  # as peft does


def moved(heads):
    heads.q.weight.data = heads.q.weight.data + 1


def swapped(heads):
    heads.k.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))


def loaded(heads):
    heads.load_state_dict({name: p.detach() + 1 for name, p in heads.named_parameters()})


@pytest.mark.parametrize("change", [written, merged, moved, swapped, loaded])
def test_whatever_is_done_to_a_weight_is_seen_and_nothing_is_traced_again(traces, change):
    heads, x = Heads(), rows()
    joined = compiled(heads, traces)
    joined(x)
    change(heads)
    assert torch.equal(joined(x), heads(x))
    assert is_packed(heads)
    assert len(traces) == 1


def test_exact_keeps_the_bits_where_one_product_has_others(traces, other_order):
    heads, x = Heads(), rows()
    assert torch.equal(compiled(heads, traces)(x), heads(x))
    assert not torch.equal(compiled(Heads(), traces, "fused")(x), heads(x))


@pytest.mark.parametrize("numerics", ["exact", "fused"])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_that_cannot_be_moved_are_multiplied_where_they_lie(traces, numerics, bias):
    heads, x = Heads(bias), rows()
    kept = heads.state_dict()
    close = {"rtol": 0, "atol": 0} if numerics == "exact" else {}
    torch.testing.assert_close(compiled(heads, traces, numerics)(x), heads(x).detach(), **close)
    assert not is_packed(heads)
    assert kept.keys() == heads.state_dict().keys()


def test_layers_with_hooks_are_called_and_those_with_gradients_record_them(traces):
    heads, x = Heads(), rows()
    heads.q.register_forward_hook(lambda layer, args, y: y * 0)
    assert not compiled(heads, traces)(x)[..., :WIDTH].any()
    fuse, heads = Fusions("exact", None, {}), Heads()
    joined = torch.compile(lambda: fuse.projections(QKV, x, heads.layers), backend=traces)
    sum(y.sum() for y in joined()).backward()
    assert all(p.grad is not None for p in heads.parameters())
    assert [t["linear"] for t in traces] == [3, 3]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("numerics", ["exact", "fused"])
def test_rows_are_joined_without_a_pass_of_their_own_and_hooks_are_called(traces, numerics, hooked):
    torch.manual_seed(0)
    first, gelu, last = nn.Linear(WIDTH, 64), nn.GELU(approximate="tanh"), nn.Linear(64 + 16, WIDTH)
    left, x = torch.randn(2, 5, 16), rows()
    if hooked:
        last.register_forward_hook(lambda layer, args, y: y * 2)
    fuse = Fusions(numerics, None, {})

    @torch.no_grad()
    def joined():
        return fuse.joined_linear(last, left, first, gelu, x)

    with torch.no_grad():
        expected = last(torch.cat([left, gelu(first(x))], -1))
    got = torch.compile(joined, backend=traces, fullgraph=True)()
    close = {"rtol": 0, "atol": 0} if numerics == "exact" else {}
    torch.testing.assert_close(got, expected, **close)
    assert traces[0]["cat"] == 0


def build(name, traces=None, **how):
    """An injected model with compiled blocks, its inputs, and its result before injection."""
    tiny = {"tiny": True, "dtype": torch.float32}
    model, inputs = models.build(name, **tiny), models.inputs(name, **tiny)
    expected = run(model, inputs)
    if traces is not None:
        kw.inject(model, **how)
        repeated = model._repeated_blocks or model._no_split_modules
        for module in model.modules():
            if type(module).__name__ in repeated:
                module.compile(backend=traces, fullgraph=True)
    return model, inputs, expected


BLOCKS = {  # calls in a block: ops of ours, other GEMMs and concatenations
    "ltx-video": [{"projections": 1, "products_of_text": 1, "total": 1, "linear": 5, "cat": 0}],
    "wan-1.3b": [{"projections": 1, "total": 1, "linear": 7, "cat": 0}],
    # double blocks concatenate the values of both streams; single blocks have two traces, the first
    # for the output of the double blocks
    "flux-dev": [
        {"projections": 2, "joint_qk": 1, "linear": 8, "cat": 1},
        *[{"projections": 1, "gelu_beside": 1, "joint_norm": 1, "linear": 3, "cat": 0}] * 2,
    ],
    # with a second attention, without it, and the last block, which drops the text
    "sd3.5-medium": [
        {"projections": 3, "joint_qk": 1, "linear": 9, "cat": 1},
        {"projections": 2, "joint_qk": 1, "linear": 8, "cat": 1},
        {"projections": 2, "joint_qk": 1, "linear": 5, "cat": 1},
    ],
}


@pytest.mark.parametrize("name", share(BLOCKS, 2))
def test_blocks_share_a_trace_that_has_the_fusions_and_is_not_made_again(traces, name):
    model, inputs, expected = build(name, traces)
    for _ in range(3):
        assert same(run(model, inputs), expected)
    joint = {"joint_qk", "joint_norm", "gelu_beside"}
    ours = {"projections", "products_of_text", "total"} | joint
    for trace, wanted in zip(traces, BLOCKS[name], strict=True):
        assert {n: trace[f"{n}.default" if n in ours else n] for n in wanted} == wanted


def test_single_products_are_ops_where_there_is_an_algorithm_to_choose(traces, monkeypatch):
    monkeypatch.setattr(packed_gemm, "is_tuned", mark_constant(lambda *device: True))
    model, inputs, expected = build("ltx-video", traces)
    assert same(run(model, inputs), expected)
    (trace,) = traces
    # all but the query of cross-attention, which has no fusion site
    assert (trace["product.default"], trace["linear"]) == (4, 1)


def test_adapters_that_come_later_and_restoring_are_seen(traces):
    from peft import LoraConfig

    model, inputs, plain = build("ltx-video", traces)
    run(model, inputs)
    adapter = LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False)
    model.add_adapter(adapter, "style")
    with eagerly():
        expected = run(model, inputs)
    assert not same(expected, plain)
    assert same(run(model, inputs), expected)
    kw.restore(model)
    assert same(run(model, inputs), expected)
    assert not any("projections" in name for name in traces[-1])


@pytest.fixture
def made(monkeypatch):
    """Counts how often the projections of the text are computed."""
    calls, usual = [], packed_gemm.separate_linears
    monkeypatch.setattr(packed_gemm, "separate_linears", lambda *a: calls.append(1) or usual(*a))
    return calls


SAMPLES = TensorSamples()


def of_text(heads, text):
    """As in the forward of a model, which first checks whether weights were written to."""
    with model_run.begin(nn.Identity(), (text,), {}, SAMPLES), torch.no_grad():
        if not SAMPLES.check()():
            SAMPLES.forget()
        weights = [layer.weight for layer in heads.layers]
        return compiled_prompt_values.TEXT_PROJECTIONS(
            text, weights, [layer.bias for layer in heads.layers]
        )


def test_products_of_a_text_are_made_until_it_comes_again(made):
    heads, text = Heads(), rows()
    for _ in range(4):
        y = of_text(heads, text)
        assert torch.equal(y, heads(text))
        y.zero_()  # the caller may write to it
    assert len(made) == 2
    of_text(heads, text.clone())
    of_text(heads, text.clone())
    assert len(made) == 4


def written_text(heads, text):
    text.add_(1)


def written_weight(heads, text):
    with torch.no_grad():
        heads.v.weight.add_(1)


def adapter_merged(heads, text):
    around, layer = nn.Module(), heads.v
    around.base_layer = layer
    layer.weight.data += 1
    heads.v = layer


@pytest.mark.parametrize("change", [written_text, written_weight, adapter_merged])
def test_what_was_made_of_a_text_is_made_anew_when_something_changes(change):
    heads, text = Heads(), rows()
    for _ in range(3):
        of_text(heads, text)
    change(heads, text)
    assert torch.equal(of_text(heads, text), heads(text))


def test_what_was_made_of_a_text_goes_with_it():
    heads, text = Heads(), rows()
    for _ in range(2):
        of_text(heads, text)
    entry = compiled_prompt_values._by_weight[heads.q.weight.untyped_storage()]
    assert entry.value is not None
    del text
    assert entry.value is None


def test_kept_tables_are_read_where_they_are_narrow(traces, monkeypatch):
    model, inputs, _ = build("ltx-video", traces)
    # one video only: a CPU may round the cosines of a second one differently
    inputs = {n: v[:1] if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    usual, found = rope_tables.narrow, []

    def narrow(given):
        made = usual(given)
        found.append(made[0].numel() / given[0].numel())
        return made

    monkeypatch.setattr(rope_tables, "narrow", narrow)
    result = run(model, inputs)
    assert found == [0.5] * len(model.transformer_blocks)
    with eagerly():
        assert same(result, run(model, inputs))


def test_graphs_replay_blocks_that_are_compiled(traces, monkeypatch):
    monkeypatch.setattr(graphs_module, "Graphs", CpuGraphs)
    model, inputs, expected = build("ltx-video")
    report = kw.inject(model, graphs=True)
    for block in model.transformer_blocks:
        block.compile(backend=traces, fullgraph=True)
    for _ in range(4):
        assert same(run(model, inputs), expected)
    (graphs,) = report.graphs
    # first the forward without the text's projections, and these; then the forward again
    assert graphs.counts == (2, 4)
    other = {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"].flip(1)}
    result = run(model, other)
    with eagerly():
        assert same(result, run(model, other))
    assert graphs.captured == 1
    assert len(traces) == 1  # nothing is recompiled during capture


def test_a_copy_of_a_compiled_model_has_weights_of_its_own(traces):
    model, inputs, expected = build("ltx-video", traces)
    run(model, inputs)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.transformer_blocks[0].attn1.to_q.weight.zero_()
    assert not same(run(twin, inputs), expected)
    assert same(run(model, inputs), expected)
