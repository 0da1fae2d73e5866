"""Ops in a graph of torch.compile without gradients bypass the dispatcher, unless a mode or a
subclass has to see them there."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from inject.heads import Heads, rows
from kernelwright.inject.fusions.compiled_ops import (
    GELU_BESIDE,
    JOINT_NORM,
    JOINT_QK,
    JOINT_RESIDUAL,
    TOTAL,
    concat_or_view,
)
from kernelwright.inject.reuse.compiled_prompt_values import TEXT_PROJECTIONS
from kernelwright.inject.reuse.packed_gemm import PROJECTIONS, TUNED_LINEAR
from kernelwright.inject.reuse.rope_tables import QK_NORM_ROPE_KEPT
from kernelwright.ops.residual import GATED_RESIDUAL_NORM
from kernelwright.ops.rmsnorm import RMSNORM


class Seen(TorchDispatchMode):
    """The names of our ops that go through the dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "kernelwright":
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def norm(x):
    return RMSNORM.unrecorded_op, (x, None, 1e-6, "torch", "")


def residual_norm(x):
    return GATED_RESIDUAL_NORM.unrecorded_op, (x, x, x, None, None, x, x, "layer", 1e-6)


def total(x):
    return TOTAL, (torch.ones(6, x.shape[-1]), x[:, :1])


def joined(x):
    layers = Heads().layers
    return PROJECTIONS, (x, [m.weight for m in layers], [m.bias for m in layers], 0)


def chosen(x):
    layer = Heads().q
    return TUNED_LINEAR, (x, layer.weight, layer.bias)


def of_text(x):
    return TEXT_PROJECTIONS, joined(x)[1][:3]


def beside(x):
    return GELU_BESIDE, (x, x, True, "torch", "")


def joint_norm(x):
    part = x[:, :1]
    return JOINT_NORM, (x[:, :2], x[:, 2:], None, part, part, None, 1e-6, "diffusers", "")


def joint_residual(x):
    return JOINT_RESIDUAL, (x[:, :2], x[:, 2:], x, x[:, :1], "diffusers", "")


def side_by_side(x):
    heads, weight = x.unflatten(-1, (2, -1)), torch.ones(x.shape[-1] // 2)
    parts = [heads, heads], [heads, heads], [weight, weight], [weight, weight]
    return JOINT_QK, (*parts, [1e-6, 1e-6], None, None, "diffusers", "", True)


def turned(x):
    heads, table = x.unflatten(-1, (2, -1)), torch.ones(x.shape[1], x.shape[-1] // 2)
    how = 1e-6, False, "interleaved", "diffusers", ""
    return QK_NORM_ROPE_KEPT, (heads, heads, None, None, table, table, *how)


every_op = pytest.mark.parametrize(
    "make",
    [
        norm,
        residual_norm,
        total,
        joined,
        chosen,
        of_text,
        beside,
        joint_norm,
        joint_residual,
        side_by_side,
        turned,
    ],
)


def equal(a, b):
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
    return all(torch.equal(one, other) for one, other in pairs)


@every_op
def test_a_call_asks_the_dispatcher_only_where_somebody_looks_on(make, monkeypatch):
    op, args = make(rows())
    with torch.no_grad():
        with Seen() as seen:
            expected = op(*args)
        assert seen.names == [op.__name__]
        monkeypatch.setitem(op.__call__.__globals__, "_through_dispatcher", None)
        assert equal(op(*args), expected)


@every_op
def test_a_tensor_without_values_gets_its_shape_from_the_dispatcher(make):
    op, args = make(rows())
    with torch.no_grad():
        expected = op(*args)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = op(*make(mode.from_tensor(rows()))[1])
    for one, other in zip(
        *(t if isinstance(t, tuple) else (t,) for t in (fake, expected)), strict=True
    ):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_a_subclass_in_a_list_is_seen_by_the_dispatcher():
    (x, weights, biases, exact) = joined(rows())[1]
    with torch.no_grad():
        expected = PROJECTIONS(x, weights, biases, exact)
        twice = [TwoTensor(w.data, w.data) for w in weights]
        got = PROJECTIONS(x, twice, biases, exact)
    assert type(got) is TwoTensor
    torch.testing.assert_close(got.a, expected)


def test_arguments_may_be_left_out_and_named(monkeypatch):
    x = rows()
    monkeypatch.setitem(RMSNORM.unrecorded_op.__call__.__globals__, "_through_dispatcher", None)
    assert torch.equal(RMSNORM.unrecorded_op(x), RMSNORM(x, None, 1e-6))
    named = RMSNORM.unrecorded_op(x, eps=0.5, backend="torch")
    assert torch.equal(named, RMSNORM(x, None, 0.5))


def neighbours():
    x = rows()
    return x[:, :2], x[:, 2:]


def neighbours_of_one():
    x = rows()[:1]
    return x[:, :2], x[:, 2:]


@pytest.mark.parametrize("make", [neighbours, neighbours_of_one])
def test_streams_that_lie_behind_each_other_are_read_there(make):
    streams = make()
    assert torch.equal(concat_or_view(streams), torch.cat(streams, 1))
    assert concat_or_view(streams).data_ptr() == streams[0].data_ptr()


def the_other_way_round():
    return neighbours()[::-1]


def with_a_gap():
    x = rows()
    return x[:, :2], x[:, 3:]


def of_other_rows():
    x = rows()
    return x[:, :2], x[:, 2:].contiguous()


def behind_the_whole_batch():
    """In one allocation, but not in the order of tokens."""
    x = torch.arange(48.0)
    return x[:32].view(2, 4, 4), x[32:].view(2, 2, 4)


def of_two_allocations():
    """The second may start where the first ends by chance."""
    memory = torch.arange(64.0)
    first = torch.from_dlpack(memory[:32]).view(1, 2, 16)
    return first, torch.from_dlpack(memory[32:]).view(1, 2, 16)


@pytest.mark.parametrize(
    "make",
    [the_other_way_round, with_a_gap, of_other_rows, behind_the_whole_batch, of_two_allocations],
)
def test_other_streams_are_joined_in_memory_of_their_own(make):
    streams = make()
    assert torch.equal(concat_or_view(streams), torch.cat(streams, 1))
    assert concat_or_view(streams).data_ptr() != streams[0].data_ptr()
