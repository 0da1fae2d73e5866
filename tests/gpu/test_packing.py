"""Linear layers of one input as one product, on a GPU: its bits, and the memory of the weights."""

from typing import NamedTuple

import pytest
import torch
from inject.harness import run, same
from torch import nn

import kernelwright as kw
from kernelwright import models
from kernelwright.inject.fusions import QKV, Fusions
from kernelwright.inject.reuse import packed_weights

pytest.importorskip("diffusers")
LOW = [torch.bfloat16, torch.float16]


class Case(NamedTuple):
    """Rows of the input and their width, the outputs of the layers, and whether they have a bias.
    `one`: the product is known to sum as its layers do (bfloat16, H200)."""

    rows: tuple[int, ...]
    width: int
    sizes: tuple[int, ...]
    bias: bool
    one: bool = False

    def layers(self, dtype):
        torch.manual_seed(0)
        how = {"bias": self.bias, "dtype": dtype, "device": "cuda"}
        made = [nn.Linear(self.width, n, **how) for n in self.sizes]
        return [layer.requires_grad_(False) for layer in made]

    def x(self, dtype, seed=1):
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = (*self.rows, self.width)
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)


CASES = {
    "tiny": Case((2, 18), 128, (128,) * 3, True),
    "ltx-25f": Case((2, 1320), 2048, (2048,) * 3, True),
    "ltx-49f": Case((2, 2688), 2048, (2048,) * 3, True, one=True),
    "flux": Case((1, 4096), 3072, (3072,) * 3, True),
    "flux-text": Case((1, 512), 3072, (3072,) * 3, True),
    "flux-single": Case((1, 4608), 3072, (3072,) * 3, True),
    "sd3.5": Case((2, 4096), 1536, (1536,) * 3, True),
    "sd3.5-text": Case((2, 333), 1536, (1536,) * 3, True),
    "wan": Case((1, 32760), 1536, (1536,) * 3, True),
    "llama": Case((1, 4096), 4096, (4096, 1024, 1024), False),
    "llama-gate-up": Case((1, 4096), 4096, (14336, 14336), False),
    "llama-one-token": Case((1, 1), 4096, (4096, 1024, 1024), False),
}


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_exact_has_the_bits_of_layers_that_were_never_packed(name, dtype, record_property):
    case = CASES[name]
    layers, fuse = case.layers(dtype), Fusions("exact", None, {})
    inputs = [case.x(dtype, seed) for seed in range(3)]
    expected = [[layer(x) for layer in layers] for x in inputs]
    for x, wanted in zip(inputs, expected, strict=True):
        parts = fuse.projections(QKV, x, layers)
        assert all(map(torch.equal, parts, wanted))
        # a layer by itself too: its weight lies elsewhere now, as well aligned as before
        assert all(torch.equal(layer(x), y) for layer, y in zip(layers, wanted, strict=True))
    one = list(fuse.same_bits.known.values())
    record_property("one product", one)
    print(f"{name} {dtype}: {'one product' if all(one) else 'its layers apart'}")
    assert len(one) == 1
    if case.one and dtype is torch.bfloat16:
        assert one == [True]


@pytest.mark.parametrize("name", ["ltx-49f", "llama-gate-up"])
def test_packing_takes_no_memory(name):
    case = CASES[name]
    layers, x = case.layers(torch.bfloat16), case.x(torch.bfloat16)
    weights = sum(p.nbytes for layer in layers for p in layer.parameters())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert isinstance(packed_weights.packed(layers, x), packed_weights.Packed)
    slack = 2**20  # small blocks are rounded up
    assert torch.cuda.memory_allocated() <= before + slack
    assert torch.cuda.max_memory_allocated() <= before + weights + slack
    for layer in layers:
        layer.cpu()
    assert torch.cuda.memory_allocated() <= before - weights + slack


def test_weights_packed_on_one_stream_are_there_for_every_other():
    case = CASES["ltx-49f"]
    layers, x = case.layers(torch.bfloat16), case.x(torch.bfloat16)
    expected = [layer(x) for layer in layers]
    torch.cuda.synchronize()
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        packed_weights.packed(layers, x)
    with torch.cuda.stream(other):
        results = [layer(x) for layer in layers]
    torch.cuda.synchronize()
    assert all(map(torch.equal, results, expected))


def test_nothing_is_packed_while_somebody_captures():
    case = CASES["tiny"]
    layers, x = case.layers(torch.bfloat16), case.x(torch.bfloat16)
    fuse = Fusions("exact", None, {})
    expected = [layer(x) for layer in layers]  # cuBLAS is warm
    addresses = [p.data_ptr() for layer in layers for p in layer.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = fuse.projections(QKV, x, layers)
    assert [p.data_ptr() for layer in layers for p in layer.parameters()] == addresses
    graph.replay()
    assert all(map(torch.equal, parts, expected))


@pytest.mark.parametrize("name", ["ltx-video", "llama-3-8b"])
def test_a_graph_is_captured_at_the_second_call_all_the_same(name):
    how = {"tiny": True, "dtype": torch.bfloat16, "device": "cuda"}
    model, inputs = models.build(name, **how), models.inputs(name, **how)
    expected = run(model, inputs)
    with kw.injected(model, graphs=True) as report:
        for _ in range(2):
            assert same(run(model, inputs), expected)
        (graphs,) = report.graphs
        assert graphs.captured == 1, graphs.describe()
        assert not graphs.reasons


def test_a_model_that_was_moved_is_packed_again():
    how = {"tiny": True, "dtype": torch.bfloat16, "device": "cuda"}
    model, inputs = models.build("ltx-video", **how), models.inputs("ltx-video", **how)
    expected = run(model, inputs)
    with kw.injected(model, graphs=True):
        for _ in range(4):
            assert same(run(model, inputs), expected)
        model.to("cpu").to("cuda")
        for _ in range(4):
            assert same(run(model, inputs), expected)
    attention = model.transformer_blocks[0].attn1
    query, key = attention.to_q.weight, attention.to_k.weight
    assert key.data_ptr() == query.data_ptr() + query.nbytes
