"""Graphs that are written differently before they are planned."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from kernelwright.fuser import planning, recording, rewriting, running
from kernelwright.fuser.program import Program
from kernelwright.fuser.recorded_ops import (
    ATTENTION,
    LINEAR,
    LINEAR_GELU,
    LINEAR_OF_ACTIVATION,
    LINEAR_OF_PARTS,
    LINEARS,
)

aten = torch.ops.aten


class Convolved(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1, bias=bias)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(self.conv(x))


class FeedForward(nn.Module):
    def __init__(self, approximate="tanh", bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=bias), nn.Linear(64, 16)
        self.act = nn.GELU(approximate=approximate)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


def recorded(block, x):
    with torch.no_grad():
        return recording.record(block.eval(), (x,), {})


def result(made, block, x):
    with torch.no_grad():
        outputs = running.run(planning.plan(made), made.inputs(block, (x,), {}))
        return made.result(outputs), block(x)


@pytest.mark.parametrize("apart", [True, False])
def test_the_bias_of_a_convolution_goes_into_the_program_after_it(apart, monkeypatch):
    block, x = Convolved(), torch.randn(2, 8, 6, 6)
    monkeypatch.setattr(rewriting, "adds_bias_apart", lambda *_: apart)
    made = recorded(block, x)
    rewriting.take_bias_out_of_convolutions(made.graph)
    (node,) = made.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert (node.args[2] is None) == apart
    plan = planning.plan(made)
    assert len(plan.steps) == 2  # the convolution, and one program
    assert plan.ops == 1 + apart
    torch.testing.assert_close(*result(made, block, x))


def test_a_convolution_without_bias_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(rewriting, "adds_bias_apart", lambda *_: True)
    made = recorded(Convolved(bias=False), torch.randn(2, 8, 6, 6))
    before = str(made.graph)
    rewriting.take_bias_out_of_convolutions(made.graph)
    assert str(made.graph) == before


class OfAPart(nn.Module):
    """A linear layer of some tokens, as after attention of two streams."""

    def __init__(self, tokens=5):
        super().__init__()
        self.out, self.tokens = nn.Linear(16, 16), tokens

    def forward(self, x):
        return self.out(x[:, x.shape[1] - self.tokens :]) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_bias_of_a_layer_of_some_tokens_goes_into_the_program_after_it(batch, dtype):
    torch.manual_seed(0)
    block, x = OfAPart().to(dtype), torch.randn(batch, 9, 16, dtype=dtype)
    made = recorded(block, x)
    rewriting.take_bias_out_of_products(made.graph)
    (node,) = made.graph.find_nodes(op="call_function", target=LINEAR)
    apart = batch == 2  # the tokens of one sample have no gaps
    assert (node.args[2] is None) == apart
    plan = planning.plan(made)
    assert len(plan.steps) == 2
    assert plan.ops == 1 + apart
    assert torch.equal(*result(made, block, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 5), (2, 5), (2, 4), (2, 9)])
def test_a_layer_of_most_tokens_is_a_part_of_that_of_all(batch, tokens, dtype, monkeypatch):
    monkeypatch.setattr(rewriting, "COPY_IN_PRODUCTS", 16)
    torch.manual_seed(0)
    block, x = OfAPart(tokens).to(dtype), torch.randn(batch, 9, 16, dtype=dtype)
    made, asked = recorded(block, x), []

    def wanted(layer, rows, first, count):
        asked.append((layer.target, tuple(rows.shape), first, count))
        return True

    rewriting.take_bias_out_of_products(made.graph)
    rewriting.multiply_whole_rows(made.graph, wanted)
    (node,) = made.graph.find_nodes(op="call_function", target=LINEAR)
    whole = (batch, tokens) == (2, 5)  # without a gap, or of few tokens, nothing is saved
    assert asked == [(LINEAR, (2, 9, 16), 9 - tokens, tokens)] * whole
    assert tuple(node.meta["val"].shape) == (batch, 9 if whole else tokens, 16)
    assert len(planning.plan(made).steps) == 2
    got, expected = result(made, block, x)
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride()


def test_a_layer_of_most_tokens_stays_if_it_is_not_wanted():
    made = recorded(OfAPart(), torch.randn(2, 9, 16))
    rewriting.take_bias_out_of_products(made.graph)
    before = str(made.graph)
    rewriting.multiply_whole_rows(made.graph, lambda *_: False)
    assert str(made.graph) == before


class Across(nn.Module):
    """Linear layers of what a convolution leaves across: a token's elements are apart."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2) * 2
        return self.one(tokens) + self.two(tokens) + tokens


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_rows_of_a_product_are_stored_by_the_program_that_computes_them(wanted, gradients):
    torch.manual_seed(0)
    block, x = Across().requires_grad_(gradients), torch.randn(2, 16, 3, 5)
    made = recorded(block, x)
    rewriting.take_bias_out_of_products(made.graph)
    asked = []

    def answer(node, by_program):
        asked.append(by_program)
        return wanted

    rewriting.copy_rows_of_products(made.graph, answer)
    assert asked == [True, True]
    layers = made.graph.find_nodes(op="call_function", target=LINEAR)
    assert {n.args[0].meta["val"].is_contiguous() for n in layers} == {wanted}
    assert len({n.args[0] for n in layers}) == 1
    got, expected = result(made, block, x)
    assert torch.equal(got, expected) or wanted  # on a CPU a product of rows may have other bits
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride()


@pytest.mark.parametrize("x", [torch.randn(2, 5, 16), torch.randn(2, 5, 32)[..., :16]])
def test_rows_that_lie_at_equal_distances_are_read_where_they_are(x):
    made = recorded(nn.Linear(16, 16), x)
    before = str(made.graph)
    rewriting.copy_rows_of_products(made.graph, lambda *_: True)
    assert str(made.graph) == before


def test_the_bias_stays_where_pytorch_is_told_to_flatten_rows(monkeypatch):
    monkeypatch.setenv("TORCH_LINEAR_FLATTEN_3D", "1")
    made = recorded(OfAPart(), torch.randn(2, 9, 16))
    rewriting.take_bias_out_of_products(made.graph)
    (node,) = made.graph.find_nodes(op="call_function", target=LINEAR)
    assert node.args[2] is not None


def targets(made):
    return [n.target for n in made.graph.find_nodes(op="call_function", target=LINEAR)], [
        n.target for n in made.graph.find_nodes(op="call_function", target=LINEAR_GELU)
    ]


def test_gelu_goes_into_the_product_before_it():
    block, x = FeedForward(), torch.randn(4, 16)
    made = recorded(block, x)
    rewriting.take_gelu_into_products(made.graph)
    assert targets(made) == ([LINEAR], [LINEAR_GELU])
    got, want = result(made, block, x)
    assert torch.equal(got, want)  # without the epilogue it is both ops, one after the other


@pytest.mark.parametrize("other", [{"approximate": "none"}, {"bias": False}], ids=str)
def test_a_gelu_that_cublas_does_not_have_stays_as_it_is(other):
    made = recorded(FeedForward(**other), torch.randn(4, 16))
    rewriting.take_gelu_into_products(made.graph)
    assert targets(made) == ([LINEAR, LINEAR], [])


class Joins(nn.Module):
    """Adds a linear layer of two branches that it concatenates."""

    def __init__(self, act, left=16, out=16, dim=-1):
        super().__init__()
        self.left, self.up, self.act, self.dim = nn.Linear(16, left), nn.Linear(16, 64), act, dim
        self.down = nn.Linear(left + 64 if dim == -1 else 64, out)

    def forward(self, x):
        joined = torch.cat([self.left(x), self.act(self.up(x * 2))], dim=self.dim)
        return self.down(joined) * 3


def test_a_product_of_a_concatenation_becomes_one_of_its_parts():
    block, x = Joins(nn.GELU(approximate="tanh")), torch.randn(2, 4, 16)
    made = recorded(block, x)
    rewriting.take_gelu_into_products(made.graph)
    rewriting.split_products_of_concatenations(made.graph)
    assert not made.graph.find_nodes(op="call_function", target=aten.cat.default)
    (node,) = made.graph.find_nodes(op="call_function", target=LINEAR_OF_PARTS)
    assert len(node.args[0]) == 2
    got, want = result(made, block, x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "block",
    [
        Joins(nn.SiLU()),  # a program stores it in its place
        Joins(nn.Identity(), out=80),  # the result is as large as what would be copied
        Joins(nn.Identity(), left=15),  # the second part would begin where no vector may
        Joins(nn.Identity(), left=64, dim=1),
    ],
    ids=["computed", "wide", "odd", "tokens"],
)
def test_other_concatenations_stay(block):
    x = torch.randn(2, 4, 16)
    made = recorded(block, x)
    rewriting.split_products_of_concatenations(made.graph)
    assert not made.graph.find_nodes(op="call_function", target=LINEAR_OF_PARTS)
    got, want = result(made, block, x)
    assert torch.equal(got, want)


class Gated(nn.Module):
    """The forms in which libraries write the second layer of a feed-forward."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.up, self.gate = nn.Linear(16, 32), nn.Linear(16, 32)
        self.down = nn.Linear(48 if "left" in form else 32, 16)

    def forward(self, x):
        up, gate = self.up(x), self.gate(x)
        if "halves" in self.form:
            up, gate = torch.cat([up, gate], 0).reshape(-1, 32).chunk(2)
        y = {"silu": F.silu, "tanh": lambda t: F.gelu(t, approximate="tanh"), "erf": F.gelu}[
            self.form.split()[0]
        ](gate)
        y = up * y if "up" in self.form else y
        y = y * up if "gated" in self.form else y
        if "left" in self.form:
            y = torch.cat([x, y], -1)
        if "read twice" in self.form:
            return self.down(y) + y.sum(-1, keepdim=True)
        if "twice" in self.form:
            y = y * 2
        return self.down(y)


FORMS = {
    "silu": ("silu", False, False),
    "silu up": ("silu", True, False),
    "silu gated": ("silu", True, False),
    "tanh": ("gelu_tanh", False, False),
    "erf up": ("gelu", True, False),
    "tanh left": ("gelu_tanh", False, True),
    "silu up left": ("silu", True, True),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_activation_goes_into_the_product_after_it(form):
    block, x = Gated(form), torch.randn(4, 16)
    made = recorded(block, x)
    rewriting.take_activations_into_products(made.graph, lambda *_: True)
    (node,) = made.graph.find_nodes(op="call_function", target=LINEAR_OF_ACTIVATION)
    *_, activation, up, left = node.args
    assert (activation, up is not None, left is not None) == FORMS[form]
    got, want = result(made, block, x)
    assert torch.equal(got, want)
    assert not [s for s in planning.plan(made).steps if isinstance(s, Program)]


@pytest.mark.parametrize("form", ["silu twice", "silu read twice", "silu halves"])
def test_what_others_read_or_change_stays_an_activation_of_its_own(form):
    block, x = Gated(form), torch.randn(4, 16)
    made = recorded(block, x)
    rewriting.take_activations_into_products(made.graph, lambda *_: True)
    assert not made.graph.find_nodes(op="call_function", target=LINEAR_OF_ACTIVATION)
    torch.testing.assert_close(*result(made, block, x))


def test_only_wanted_products_take_an_activation():
    made = recorded(Gated("silu up"), torch.randn(4, 16))
    rewriting.take_activations_into_products(made.graph, lambda node: False)
    assert not made.graph.find_nodes(op="call_function", target=LINEAR_OF_ACTIVATION)


class Attention(nn.Module):
    def __init__(self, bias=True, flat=False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 64, bias=bias) for _ in range(3))
        self.flat = flat

    def forward(self, x):
        q, k, v = (layer(x) for layer in (self.q, self.k, self.v))
        if self.flat:  # no view of a part of a larger tensor
            return q.view(-1).sigmoid(), k.sigmoid(), v.sigmoid()
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in (q, k, v))
        q, k = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6), k * 2
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def joined(block, wanted=lambda nodes: True):
    made = recorded(block, torch.randn(2, 6, 32))
    rewriting.join_products_of_one_input(made.graph, wanted)
    return made, len(made.graph.find_nodes(op="call_function", target=LINEARS))


@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_input_are_parts_of_one_product(bias):
    block, x = Attention(bias), torch.randn(2, 6, 32)
    made, products = joined(block)
    assert products == 1
    assert targets(made) == ([], [])
    got, want = result(made, block, x)
    assert torch.equal(got, want)
    # query and key are one program: both are parts of the product
    assert sum(isinstance(s, Program) for s in planning.plan(made).steps) == 1


def test_only_wanted_layers_are_joined():
    made, products = joined(Attention(), wanted=lambda nodes: False)
    assert not products
    assert len(targets(made)[0]) == 3


def test_layers_whose_results_have_to_lie_alone_stay_apart():
    block, x = Attention(flat=True), torch.randn(2, 6, 32)
    made, products = joined(block)
    assert not products
    got, want = result(made, block, x)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


class Scaled(nn.Module):
    """What an adapter adds, with a scale."""

    def __init__(self, scale):
        super().__init__()
        self.down, self.up, self.scale = nn.Linear(16, 4), nn.Linear(4, 16), scale

    def forward(self, x):
        scaled = self.up(self.down(x) * self.scale) * self.scale
        return x + scaled, x * self.scale


@pytest.mark.parametrize(("scale", "left"), [(1.0, 1), (0.5, 3)])
def test_what_is_multiplied_by_one_is_read_as_it_is(scale, left):
    """Only a result is another tensor."""
    block, x = Scaled(scale), torch.randn(3, 16)
    made = recorded(block, x)
    rewriting.drop_factors_of_one(made.graph)
    assert len(made.graph.find_nodes(op="call_function", target=aten.mul.Tensor)) == left
    for ours, theirs in zip(*result(made, block, x), strict=True):
        assert torch.equal(ours, theirs)


def test_rows_with_gaps_that_are_multiplied_by_one_are_rows_of_their_own():
    class Part(nn.Module):
        def forward(self, x):
            return (x[:, 0].expand(4, 4) * 1.0) @ x

    made = recorded(Part(), torch.randn(4, 4))
    rewriting.drop_factors_of_one(made.graph)
    assert len(made.graph.find_nodes(op="call_function", target=aten.mul.Tensor)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norms_without_an_eps_get_pytorchs(dtype):
    x = torch.randn(2, 8, dtype=dtype) * 1e-3  # so small that the eps counts
    graph = fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = x
    norm = graph.call_function(aten._fused_rms_norm.default, (given, [8], None, None))
    graph.output(norm)
    rewriting.write_out_eps(graph)
    assert norm.args[3] is not None
    expected = aten._fused_rms_norm(x, [8], None, None)
    assert all(map(torch.equal, fx.GraphModule({}, graph)(x), expected))


class Attends(nn.Module):
    """Attention of queries and keys that are joined head by head: their heads lie apart, and so do
    those of the result, which are merged."""

    def __init__(self, read="merged"):
        super().__init__()
        self.qkv, self.out, self.read = nn.Linear(16, 48), nn.Linear(16, 16), read

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        q, k = (torch.cat([-t[..., 4:], t[..., :4]], -1) for t in (q, k))
        if self.read == "queries too":
            return self.out(attended(q, k, v).transpose(1, 2).flatten(2)) + q.mean(1).repeat(
                1, 1, 2
            )
        y = attended(q, k, v)
        if self.read == "as it is":
            return self.out((y * 2).transpose(1, 2).flatten(2))
        if self.read == "returned":
            return y.transpose(1, 2).contiguous()
        if self.read == "permuted":
            return self.out(y.permute(0, 2, 1, 3).contiguous().flatten(2))
        return self.out(y.transpose(1, 2).reshape(*x.shape))


def attended(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def merged(block, x, wanted=lambda node: True):
    """The plans before and after, and the result."""
    before = planning.plan(recorded(block, x))
    made = recorded(block, x)
    rewriting.merge_heads_where_they_lie(made.graph, wanted)
    after = planning.plan(made)
    got, expected = result(made, block, x)
    assert torch.equal(got, expected)
    assert got.stride() == expected.stride()
    return before, after


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("read", ["merged", "permuted"])
def test_heads_are_merged_where_they_lie(read, batch):
    before, after = merged(Attends(read), torch.randn(batch, 6, 16))
    assert len(after.steps) == len(before.steps) - 1
    assert not after.graph.find_nodes(op="call_function", target=aten.clone.default)[2:]
    (attention,) = after.graph.find_nodes(op="call_function", target=ATTENTION)
    for x in (*attention.args[:2], attention):
        assert x.meta["val"].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("read", ["as it is", "queries too", "returned"])
def test_heads_that_are_read_otherwise_stay_apart(read):
    before, after = merged(Attends(read), torch.randn(2, 6, 16))
    assert str(after.graph) == str(before.graph)


def test_heads_stay_apart_if_it_is_not_wanted():
    asked = []
    before, after = merged(Attends(), torch.randn(2, 6, 16), lambda node: asked.append(node))
    assert str(after.graph) == str(before.graph)
    assert [node.target for node in asked] == [ATTENTION]
