"""Linear layers that share an input as one GEMM: where it is used, and its bits."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kernelwright as kw
from inject.harness import run, same
from inject.heads import WIDTH, Heads, is_packed, rows
from inject.language import model_of, words
from inject.stand_in import CpuGraphs
from kernelwright import models
from kernelwright.inject.fusions import GATE_UP, QKV, TEXT_QKV, Fusions, projections


def fusions(numerics="exact"):
    return Fusions(numerics, None, {})


@torch.no_grad()
def joined(heads, x, numerics="exact"):
    return torch.cat(fusions(numerics).projections(QKV, x, heads.layers), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_product_has_the_bits_of_its_layers(dtype):
    heads, x = Heads(dtype=dtype), rows(dtype)
    expected = heads(x)
    assert torch.equal(joined(heads, x), expected)
    assert is_packed(heads)


def test_results_are_views_of_one_product():
    parts = fusions("fused").projections(QKV, rows(), Heads().requires_grad_(False).layers)
    assert len({t.untyped_storage().data_ptr() for t in parts}) == 1
    assert [t.shape[-1] for t in parts] == [WIDTH, 2 * WIDTH, WIDTH]
    assert all(t.stride(-2) == 4 * WIDTH for t in parts)


@pytest.mark.parametrize("kind", ["hook", "forward", "class", "everywhere"])
def test_a_layer_that_is_more_than_its_weights_is_called(kind):
    heads, calls = Heads(), []

    class Louder(nn.Linear):
        def forward(self, x):
            calls.append(self)
            return super().forward(x)

    def note(module, *_):
        calls.append(module)

    handle = None
    if kind == "hook":
        heads.k.register_forward_hook(note)
    elif kind == "forward":
        heads.k.forward = lambda x: calls.append(heads.k) or F.linear(x, heads.k.weight)
    elif kind == "class":
        heads.k = Louder(WIDTH, 2 * WIDTH)
    else:
        handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        joined(heads, rows())
    finally:
        if handle is not None:
            handle.remove()
    assert heads.k in calls
    assert not is_packed(heads)


def test_where_the_bits_differ_exact_keeps_the_layers_apart(other_order):
    model = models.build("ltx-video", tiny=True, dtype=torch.float32)
    inputs = models.inputs("ltx-video", tiny=True, dtype=torch.float32)
    expected = run(model, inputs)
    with kw.injected(model) as report:
        for _ in range(2):
            assert same(run(model, inputs), expected)
    blocks = len(model.transformer_blocks)
    assert report.sites[QKV] == {projections.OTHER_BITS: blocks}
    assert not report.problems


PLACES = {
    "ltx-video": lambda m: {QKV: len(m.transformer_blocks)},
    "flux-dev": lambda m: {
        QKV: len(m.transformer_blocks) + len(m.single_transformer_blocks),
        TEXT_QKV: len(m.transformer_blocks),
    },
    "sd3.5-medium": lambda m: {
        QKV: len(m.transformer_blocks) + sum(b.use_dual_attention for b in m.transformer_blocks),
        TEXT_QKV: len(m.transformer_blocks),
    },
    "wan-1.3b": lambda m: {QKV: len(m.blocks)},
    "pixart": lambda m: {QKV: len(m.transformer_blocks)},
    "llama-3-8b": lambda m: {QKV: len(m.model.layers), GATE_UP: len(m.model.layers)},
}


@pytest.mark.parametrize("name", PLACES)
def test_every_projection_of_one_input_is_one_product(name):
    model = models.build(name, tiny=True, dtype=torch.float32)
    inputs = models.inputs(name, tiny=True, dtype=torch.float32)
    with kw.injected(model, numerics="fused") as report:
        run(model, inputs)
    found = {n: fates for n, fates in report.sites.items() if "one product" in n}
    assert found == {n: {"fused": count} for n, count in PLACES[name](model).items()}


def test_in_fp8_the_weights_stay_where_they_are():
    model = models.build("ltx-video", tiny=True, dtype=torch.bfloat16)
    inputs = models.inputs("ltx-video", tiny=True, dtype=torch.bfloat16)
    before = [p.data_ptr() for p in model.parameters()]
    with kw.injected(model, numerics="fp8"):
        run(model, inputs)
    assert [p.data_ptr() for p in model.parameters()] == before


def test_a_cache_does_not_keep_the_whole_product():
    kept = []
    cache = SimpleNamespace(update=lambda key, value, _: kept.append((key, value)) or (key, value))
    model = model_of("Llama")
    attention, x = model.model.layers[0].self_attn, torch.randn(1, 5, 64)
    rotary = model.model.rotary_emb(x, torch.arange(5)[None])
    with torch.no_grad(), kw.injected(model, numerics="fused") as report:
        attention(x, rotary, past_key_values=cache)
    assert report.sites[QKV] == {"fused": 1}
    for tensor in kept[0]:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def run_packed(model, inputs):
    with kw.injected(model, numerics="fused") as report:
        run(model, inputs)
    assert "fused" in report.sites[QKV]


def test_a_model_of_diffusers_is_saved_as_it_was(tmp_path):
    model = models.build("ltx-video", tiny=True, dtype=torch.float32)
    inputs = models.inputs("ltx-video", tiny=True, dtype=torch.float32)
    model.save_pretrained(tmp_path / "before")
    run_packed(model, inputs)
    model.save_pretrained(tmp_path / "after")
    before, after = (next((tmp_path / f).glob("*.safetensors")) for f in ("before", "after"))
    assert before.read_bytes() == after.read_bytes()
    loaded = type(model).from_pretrained(tmp_path / "after")
    assert same(run(loaded, inputs), run(model, inputs))


def test_a_model_of_transformers_is_saved_as_it_was(tmp_path):
    model = model_of("Llama")
    model.save_pretrained(tmp_path / "before")
    run_packed(model, words())
    model.save_pretrained(tmp_path / "after")
    before, after = (tmp_path / f / "model.safetensors" for f in ("before", "after"))
    assert before.read_bytes() == after.read_bytes()


def graphed():
    heads, fuse, graphs = Heads().eval().requires_grad_(False), fusions(), CpuGraphs()

    def forward(self, x):
        return torch.cat(fuse.projections(QKV, x, self.layers), -1)

    return heads, graphs, lambda x: graphs(heads, forward, (x,), {})


def test_packing_takes_no_call_from_graphs():
    heads, graphs, call = graphed()
    x = rows()
    for _ in range(3):
        assert torch.equal(call(x), heads(x))
    assert graphs.captured == 1
    assert not graphs.reasons
    assert is_packed(heads)


def test_a_graph_notices_that_the_packing_was_broken():
    heads, graphs, call = graphed()
    x = rows()
    for _ in range(3):
        call(x)
    heads.q.weight.data = heads.q.weight.data + 1
    assert torch.equal(call(x), heads(x))
    assert is_packed(heads)
    assert graphs.reasons == {"the model has changed": 1}
    for _ in range(2):
        assert torch.equal(call(x), heads(x))
    assert graphs.captured == 1
    assert graphs.reasons == {"the model has changed": 1}


def test_restored_layers_compute_as_before():
    model = models.build("pixart", tiny=True, dtype=torch.float32)
    inputs = models.inputs("pixart", tiny=True, dtype=torch.float32)
    expected, state = run(model, inputs), copy.deepcopy(model.state_dict())
    run_packed(model, inputs)
    assert same(run(model, inputs), expected)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_a_dropout_is_called_where_it_does_something_or_is_watched():
    x, drop = rows(), nn.Dropout(0.5).eval()
    seen = []
    drop.register_forward_pre_hook(lambda *_: seen.append(1))
    assert projections.run_in_order([nn.Dropout(0.5).eval(), nn.Dropout(0.0)], x) is x
    projections.run_in_order([drop], x)
    assert seen == [1]
    assert not torch.equal(projections.run_in_order([nn.Dropout(0.5).train()], x), x)
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: seen.append(2))
    projections.run_in_order([nn.Dropout(0.5).eval()], x)
    handle.remove()
    assert seen == [1, 2]


def test_a_bias_that_is_no_parameter_is_read_by_its_layer():
    layer, x = nn.Linear(WIDTH, WIDTH), rows(torch.float32)
    bias = layer.bias.detach().clone()
    del layer.bias
    layer.bias = bias
    assert torch.equal(projections.run_linear(layer, x), layer(x))
