"""Recorded blocks that cannot run as recorded run their own forward, and the report says so."""

import pytest
import torch
from fuser.blocks import Block, drawn
from torch import nn

import kernelwright as kw
from kernelwright.fuser import recorded_ops, recording
from kernelwright.inject.identify.structure import structure_of
from kernelwright.inject.reuse import packed_weights
from kernelwright.inject.reuse.packed_gemm import SameBits
from kernelwright.inject.reuse.program_products import ProgramProducts
from kernelwright.inject.reuse.programs import Programs
from kernelwright.inject.reuse.recordable import signature


class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x, condition, cos, sin):
        for block in self.blocks:
            x = block(x, condition, cos, sin)
        return x


def inputs_of_block():
    sizes = {"x": (2, 8, 64), "condition": (2, 64), "cos": (8, 32), "sin": (8, 32)}
    return {name: drawn(*size, dtype=torch.float32) for name, size in sizes.items()}


@torch.no_grad()
def test_weights_of_another_layout_run_as_they_did():
    model, given = Model().eval(), inputs_of_block()
    report = kw.inject(model)
    model(**given)
    weight = model.blocks[0].out.weight
    weight.data = weight.data.t().contiguous().t()
    got = model(**given)
    kw.restore(model)
    assert torch.equal(got, model(**given))
    assert list(report.programs[0].fell_back.values()) == [1]
    assert "1 calls ran PyTorch's ops: weights of another layout" in str(report).replace("\n", " ")


def test_a_negative_zero_is_another_number():
    assert signature((0.0,), {}) != signature((-0.0,), {})
    assert signature((float("nan"),), {}) == signature((float("nan"),), {})
    assert signature((1,), {}) != signature((True,), {})


class Settings:
    pass


def test_an_object_in_the_place_of_a_freed_one_is_another():
    module, seen = nn.Linear(2, 2), []
    for _ in range(8):
        held = Settings()
        held.to_dict = None  # as a config: compared by identity
        module.settings = held
        seen.append(structure_of(module))
        assert seen[-1] == structure_of(module)
        del held
    assert all(seen[-1] != other for other in seen[:-1])


class Projected(nn.Module):
    """A block of which nothing is worth a kernel, or that cannot be recorded."""

    def __init__(self, width=32, asks=False):
        super().__init__()
        self.norm, self.proj, self.asks = nn.LayerNorm(width), nn.Linear(width, width), asks

    def forward(self, x):
        y = self.proj(self.norm(x))
        return y * 2 if self.asks and y.sum().item() > 0 else y


@pytest.mark.parametrize("asks", [False, True], ids=["little to gain", "cannot be recorded"])
def test_a_layer_that_counts_is_called_once_even_if_its_block_is_not_recorded_after_all(asks):
    block, x, calls = Projected(asks=asks).eval(), torch.randn(2, 8, 32), []
    block.proj.register_forward_hook(lambda *_: calls.append(1))
    programs = Programs()
    with torch.no_grad():
        result = programs.run(block, (x,), {})
        if result is NotImplemented:
            result = block(x)
        assert len(calls) == 1
        assert torch.equal(result, block(x))


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(64, 128), nn.Linear(64, 128)

    def forward(self, x):
        return self.q(x) * self.k(x)


@pytest.mark.parametrize("shared", [False, True], ids=["packed", "not packed"])
@torch.no_grad()
def test_layers_of_one_input_are_one_product_where_their_weights_can_lie_together(shared):
    block, x = Projections().eval(), torch.randn(2, 8, 64)
    products = ProgramProducts(True, None, SameBits())
    made = recording.record(block, (x,), {})
    nodes = made.graph.find_nodes(op="call_function", target=recorded_ops.LINEAR)
    held = block.k.weight.data if shared else None  # another owner of its memory
    inputs = made.inputs(block, (x,), {})
    drawn_before = torch.get_rng_state()
    assert products.join(block, made, inputs, nodes) != shared
    assert torch.equal(torch.get_rng_state(), drawn_before)
    weights, biases = [block.q.weight, block.k.weight], [block.q.bias, block.k.bias]
    packed = packed_weights.packed_weights(weights, biases, x)
    assert isinstance(packed, str) == shared
    names = [n.args[1].name for n in nodes]
    got = products.of(names)(x, weights, biases)
    assert [t.stride() for t in got] == [(8 * 256, 256, 1)] * 2
    assert all(torch.equal(g, layer(x)) for g, layer in zip(got, (block.q, block.k), strict=True))
    assert held is None or held.data_ptr() == block.k.weight.data_ptr()
