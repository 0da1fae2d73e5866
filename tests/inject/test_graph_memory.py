"""Inputs and outputs of a graph: the layout of eager, in memory that only the caller holds."""

from collections import namedtuple

import pytest
import torch

from kernelwright.inject.graphs.buffers import Results

from .stand_in import alignment_of_new_memory, data, function  # noqa: F401

BASE = data(1, 6, 8)
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "columns": lambda x: x[:, 2:5],
    "every second": lambda x: x[::2, ::2],
    "expanded": lambda x: x[:1].expand(4, 8),
    "expanded scalar": lambda x: x[0, 0].expand(4),
    "overlapping": lambda x: x.as_strided((4, 4), (1, 1)),
    "gap and expanded": lambda x: x.as_strided((2, 2), (3, 0)),
    "unaligned": lambda x: x.view(-1)[3:11],
    "empty": lambda x: x[:0],
    "0-d": lambda x: x[2, 3],
    "channels last": lambda x: x.view(1, 2, 4, 6).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_forward_sees_the_layout_of_the_input(layout, mode):
    seen = []

    def forward(x):
        aligned = x.data_ptr() % 64 if x.numel() > 1 and any(x.stride()) else 0
        seen.append((x.shape, x.stride(), aligned))
        return x * 2

    graphs, call = function(forward)
    with mode():
        for seed in range(4):
            x = layout(data(seed, 6, 8))
            assert torch.equal(call(x), x * 2)
    assert graphs.captured == 1
    assert len(set(seen)) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_results_have_the_layout_of_eager(layout, mode):
    graphs, call = function(lambda x: layout(x + 1))
    with mode():
        for seed in range(4):
            x = data(seed, 6, 8)
            got, want = call(x), layout(x + 1)
            assert torch.equal(got, want)
            assert got.stride() == want.stride()
            assert got.is_inference() == want.is_inference()
    assert graphs.captured == 1


def calls(forward, *shape):
    """Inputs and results of five calls, the later ones through a graph."""
    graphs, call = function(forward)
    for seed in range(5):
        x = data(seed, *shape)
        yield x, call(x)
    assert graphs.captured == 1, graphs.reasons


def test_an_input_that_is_returned_is_the_callers_tensor():
    for x, (same, twice) in calls(lambda x: (x, x * 2)):
        assert same is x
        assert torch.equal(twice, x * 2)


def test_a_view_of_an_input_is_a_view_of_the_callers_tensor():
    for x, view in calls(lambda x: x[1:, ::2], 4, 8):
        assert torch.equal(view, x[1:, ::2])
        x.zero_()
        assert not view.any()


def test_a_weight_that_is_returned_is_the_weight():
    weight = data(9)
    module_graphs, _ = function(None)
    module = torch.nn.Identity().eval()
    module.register_buffer("table", weight)
    for seed in range(4):
        got = module_graphs(module, lambda self, x: (x + 1, self.table[0]), (data(seed),), {})
        assert got[1].data_ptr() == weight.data_ptr()
        assert torch.equal(got[0], data(seed) + 1)
    assert module_graphs.captured == 1


def test_results_that_share_memory_share_it_again():
    def forward(x):
        y = x + 1
        return y, y[0], y.t(), y

    earlier = []
    for x, (whole, row, turned, again) in calls(forward):
        assert again is whole
        assert torch.equal(whole, x + 1)
        assert torch.equal(row, whole[0])
        assert torch.equal(turned, whole.t())
        whole.zero_()
        assert not row.any()
        assert not turned.any()
        assert all(not e.any() for e in earlier)
        earlier.append(whole)


def test_parts_of_one_tensor_are_right():
    for x, parts in calls(lambda x: (x + 1).chunk(3, dim=1), 4, 600):
        for part, want in zip(parts, (x + 1).chunk(3, dim=1), strict=True):
            assert torch.equal(part, want)
            assert part.stride() == want.stride()


def test_the_types_of_results_are_kept():
    from diffusers.models.modeling_outputs import Transformer2DModelOutput
    from transformers.modeling_outputs import BaseModelOutput

    Pair = namedtuple("Pair", "a b")

    def forward(x):
        last = x * 2
        return {
            "diffusers": Transformer2DModelOutput(sample=x + 1),
            "transformers": BaseModelOutput(last_hidden_state=last, hidden_states=(x + 3, last)),
            "pair": Pair(x - 1, [None, 3, "text", torch.float32]),
        }

    for x, got in calls(forward):
        want = forward(x)
        assert type(got["diffusers"]) is Transformer2DModelOutput
        assert torch.equal(got["diffusers"].sample, want["diffusers"].sample)
        states = got["transformers"]
        assert type(states) is BaseModelOutput
        assert states.attentions is None
        assert states.hidden_states[-1] is states.last_hidden_state
        assert torch.equal(states.last_hidden_state, x * 2)
        assert torch.equal(states.hidden_states[0], x + 3)
        assert type(got["pair"]) is Pair
        assert got["pair"].b == [None, 3, "text", torch.float32]


class Opaque:
    pass


def give_back(x):
    return x + 1, Opaque()


def write(x):
    x.add_(1)
    return x * 2


def write_to_a_view(x):
    x[0].mul_(2)
    return x * 2


REFUSED = {
    "an output of type Opaque": give_back,
    "an output on meta": lambda x: (x + 1, torch.empty(1, device="meta")),
    "an output that is sparse, conjugated or negated": lambda x: (x + 1).to_sparse(),
    "an output that views an input as another dtype": lambda x: x.view(torch.int32),
    "forward writes to its inputs": write,
}


@pytest.mark.parametrize(("reason", "forward"), REFUSED.items(), ids=REFUSED)
def test_results_that_cannot_be_handed_out_run_without_a_graph(reason, forward):
    graphs, call = function(forward)
    for seed in range(3):
        got, want = call(data(seed)), forward(data(seed))
        assert type(got) is type(want)
        if isinstance(got, torch.Tensor):
            assert torch.equal(got.to_dense(), want.to_dense())
    assert graphs.captured == 0
    assert graphs.reasons == {reason: 2}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_input_written_to_is_written_to(mode):
    graphs, call = function(write_to_a_view)
    with mode():
        for seed in range(4):
            mine, theirs = data(seed), data(seed)
            assert torch.equal(call(mine), write_to_a_view(theirs))
            assert torch.equal(mine, theirs)
    assert graphs.reasons == {"forward writes to its inputs": 3}


def test_a_list_that_forward_changes_is_changed():
    def forward(x, found):
        found.append(x + 1)
        return x * 2

    graphs, call = function(forward)
    for seed in range(4):
        found = []
        call(data(seed), found)
        assert torch.equal(found[0], data(seed) + 1)
    assert graphs.reasons == {"forward changes a list or a dict among its inputs": 3}


def test_nested_inputs_are_taken_apart_and_put_together():
    Pair = namedtuple("Pair", "a b")

    def forward(x, extra, *, options):
        return x + extra.a * options["deep"][0] + extra.b

    graphs, call = function(forward)
    for seed in range(4):
        x, a, deep = data(seed), data(seed + 10), data(seed + 20)
        got = call(x, Pair(a, 3), options={"deep": [deep], "flag": True})
        assert torch.equal(got, x + a * deep + 3)
    assert graphs.captured == 1


def test_small_results_are_copied_by_one_kernel(monkeypatch):
    def copied(new, old, own=torch._foreach_copy_):
        launched.append(len(old))
        own(new, old)

    launched = []
    monkeypatch.setattr(torch, "_foreach_copy_", copied)
    whole = data(2, 4, 16)
    made = {
        "rows": data(3, 4, 8),
        "columns": data(4, 8, 4).t(),
        "halves": data(5, 4, 8).bfloat16(),
        "many": data(6, 1024, 512),
        "left": whole[:, :8],
        "right": whole[:, 8:],
    }
    results = Results(made, [data(1, 2)], [])
    found, again = (results.copies([data(1, 2)]) for _ in range(2))
    assert launched == [2, 2]  # alone in its dtype, too large, a part of a larger one: on their own
    for name, t in made.items():
        assert torch.equal(found[name], t), name
        assert found[name].stride() == t.stride()
        assert found[name].untyped_storage().data_ptr() not in (
            t.untyped_storage().data_ptr(),
            again[name].untyped_storage().data_ptr(),
        )
    assert found["left"].untyped_storage().data_ptr() == found["right"].untyped_storage().data_ptr()
