"""A recorded forward, planned as programs and run by their interpreter, has the bits of eager."""

from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fuser import blocks
from fuser.blocks import Small, drawn
from kernelwright import models
from kernelwright.backends.torch_internals import pytree
from kernelwright.fuser import interpreter, planning, readable, recording, running
from kernelwright.fuser.launching import Launched
from kernelwright.fuser.recording import CannotRecord

pytest.importorskip("diffusers")


def planned(module, *args, **kwargs):
    recorded = recording.record(module, args, kwargs)
    return recorded, planning.plan(recorded)


def check(module, *args, **kwargs):
    """The plan of a forward that has eager's bits."""
    with torch.no_grad():
        want = module(*args, **kwargs)
        recorded, plan = planned(module, *args, **kwargs)
        got = recorded.result(running.run(plan, recorded.inputs(module, args, kwargs)))
    ours, theirs = pytree.tree_leaves(got), pytree.tree_leaves(want)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a, b)
    return plan


def programs(plan):
    return [s for s in plan.steps if not isinstance(s, fx.Node)]


# tests/inject/test_any_model.py has all others
FAMILIES = ("ltx-video", "wan-1.3b", "flux-dev", "sd3.5-medium", "pixart", "dit-xl", "sdxl-unet")
FAMILIES += ("llama-3-8b", "qwen3-8b", "falcon-7b", "flux2-dev", "ltx-2", "z-image", "lumina2")


@pytest.mark.parametrize("preset", FAMILIES)
def test_blocks_of_the_presets(preset):
    found = blocks.blocks_of(preset)
    for module, args, kwargs in found.values():
        plan = check(module, *args, **kwargs)
        assert len(programs(plan)) < plan.ops


@pytest.mark.parametrize("preset", ["ltx-video", "flux-dev"])
def test_one_recording_serves_every_block_of_a_class(preset):
    build = {"tiny": True, "device": "cpu", "dtype": torch.bfloat16}
    model = models.build(preset, **build)
    first, second, *_ = model.transformer_blocks
    seen = {}

    def note(module, args, kwargs):
        seen[module] = args, kwargs

    hooks = [b.register_forward_pre_hook(note, with_kwargs=True) for b in (first, second)]
    with torch.no_grad():
        model(**models.inputs(preset, **build))
        for hook in hooks:
            hook.remove()
        recorded, plan = planned(first, *seen[first][0], **seen[first][1])
        args, kwargs = seen[second]
        got = running.run(plan, recorded.inputs(second, args, kwargs))
        want = pytree.tree_leaves(second(*args, **kwargs))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_of_no_library(dtype):
    torch.manual_seed(0)
    block = blocks.Block().to(dtype)
    x, condition = drawn(2, 48, 64, dtype=dtype), drawn(2, 64, dtype=dtype)
    cos, sin = drawn(48, 32, dtype=torch.float32), drawn(48, 32, dtype=torch.float32, seed=1)
    plan = check(block, x, condition, cos, sin)
    # silu of the condition; norm and modulation; query; key; attention's heads joined; the sum,
    # norm and modulation; the gated activation; the last sum
    assert len(programs(plan)) <= 8
    assert set(plan.left) == {
        "kernelwright.recorded_linear.default",
        "kernelwright.recorded_attention.default",
    }


COS, SIN = drawn(24, 1, 16, dtype=torch.float32), drawn(24, 1, 16, dtype=torch.float32, seed=5)
ROTATIONS = {
    "halves": lambda x: blocks.rotated_by_halves(x, COS[:, 0], SIN[:, 0]),
    "pairs": lambda x: blocks.rotated_in_pairs(x, COS, SIN),
    "in place": lambda x: blocks.rotated_in_place(x, COS, SIN),
    "complex": lambda x: blocks.rotated_as_complex(x, torch.polar(COS, SIN)[..., :8]),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_a_rotation_is_one_program(name):
    plan = check(Small(ROTATIONS[name]), drawn(2, 24, 3, 16))
    (program,) = programs(plan)
    assert len(program.stores) == 1


def test_a_norm_along_the_width_and_a_rotation_of_its_heads_are_one_program():
    class Query(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(48)

        def forward(self, x):
            return ROTATIONS["in place"](self.norm(x).unflatten(-1, (3, 16)))

    plan = check(Query().bfloat16(), drawn(2, 24, 48))
    (program,) = programs(plan)
    assert len(program.rows) == 2  # the even and the odd elements of the same norm


def test_joint_streams_are_written_where_they_belong():
    """A concatenation is no copy: each part is computed into its place."""

    def joined(text, image):
        parts = [F.layer_norm(t, (32,)) * 2 for t in (text, image)]
        return F.silu(torch.cat(parts, 1).unflatten(-1, (2, 16)).transpose(1, 2)).contiguous()

    plan = check(Small(joined), drawn(1, 5, 32), drawn(1, 11, 32))
    assert len(programs(plan)) == 2
    assert {s.target for p in programs(plan) for s in p.stores} == {
        s.target for s in programs(plan)[0].stores
    }


def normed(x, y):
    """A sum, one value for each row of it, and its norm, as a backward wants them."""
    total = x + y
    r = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    return total, r, total * r


def test_a_value_of_each_row_is_stored_with_the_row():
    (program,) = programs(check(Small(normed), torch.randn(2, 3, 64), torch.randn(2, 3, 64)))
    assert [s.shape for s in program.stores] == [(2, 3, 64), (2, 3, 1), (2, 3, 64)]


def test_a_value_of_each_row_has_a_program_of_its_own_where_both_have_no_kernel():
    module, given = Small(normed), (torch.randn(2, 3, 64), torch.randn(2, 3, 64))
    recorded = recording.record(module, tuple(given), {})
    plan = planning.plan(recorded, lambda p, _: "too much" if len(p.stores) > 2 else None)
    assert not plan.refused
    assert [s.shape for p in programs(plan) for s in p.stores].count((2, 3, 1)) == 1
    got = recorded.result(running.run(plan, recorded.inputs(module, tuple(given), {})))
    for ours, theirs in zip(got, normed(*given), strict=True):
        assert torch.equal(ours, theirs)


def weights_gradient(x, weight, g):
    """The end of a backward: an activation is computed again for the gradient of the weight after
    it, and its own gradient reads the same input."""
    y = torch.sigmoid(x) * x
    of_weight, of_y = y.T @ g, g @ weight.T
    return of_weight, of_y * torch.sigmoid(x) + of_y * x


def test_what_only_a_result_is_made_of_waits_for_a_program_that_reads_the_same():
    shapes = (32, 64), (64, 16), (32, 16)
    plan = check(Small(weights_gradient), *(torch.randn(s) for s in shapes))
    (program,) = programs(plan)
    assert [s.shape for s in program.stores] == [(32, 64), (32, 64)]
    assert len(program.loads) == 2


def test_it_does_not_wait_where_that_would_have_no_kernel():
    module = Small(weights_gradient)
    given = [torch.randn(s) for s in ((32, 64), (64, 16), (32, 16))]
    recorded = recording.record(module, tuple(given), {})
    plan = planning.plan(recorded, lambda p, _: "too much" if len(p.stores) > 1 else None)
    assert not plan.refused
    assert [len(p.stores) for p in programs(plan)] == [1, 1]
    got = recorded.result(running.run(plan, recorded.inputs(module, tuple(given), {})))
    for ours, theirs in zip(got, weights_gradient(*given), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("way", ["pairs", "halves"])
def test_heads_of_a_sum_that_is_stored_are_one_program_with_it(way):
    """The sum has a width where what reads it has heads, and takes the other element of a pair."""

    def run(x, y, cos, sin):
        total = x + y
        heads = total.unflatten(-1, (4, 16))
        if way == "halves":
            return total, blocks.rotated_by_halves(heads, cos, sin)
        return total, blocks.rotated_in_pairs(heads, cos[:, None], sin[:, None])

    tables = (torch.randn(3, 16) for _ in range(2))
    plan = check(Small(run), torch.randn(2, 3, 64), torch.randn(2, 3, 64), *tables)
    (program,) = programs(plan)
    assert len(program.loads) == 4


def test_what_has_more_to_it_than_a_sum_is_not_computed_twice():
    def run(x, y, z, cos, sin):
        total = x + y * z
        return total, blocks.rotated_in_pairs(total.unflatten(-1, (4, 16)), cos, sin)

    tables = (torch.randn(3, 1, 16) for _ in range(2))
    plan = check(Small(run), *(torch.randn(2, 3, 64) for _ in range(3)), *tables)
    assert len(programs(plan)) == 2


def test_a_value_of_two_stages_is_stored_once():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x, y):
            total = x + y * 0.5
            return total + self.linear(F.layer_norm(total, (32,)))

    plan = check(Residual().bfloat16(), drawn(2, 7, 32), drawn(2, 7, 32, seed=3))
    first, last = programs(plan)
    assert len(first.stores) == 2
    assert len(last.loads) == 2


def test_values_are_let_go_after_their_last_use():
    def steps(x):
        for _ in range(3):
            x = (x * 2).cumsum(-1)
        return x + 1

    recorded, plan = planned(Small(steps), drawn(4, 8))
    made, alive = [], []

    def runner(program, given, outputs):
        alive.append(sum(made_before() is not None for made_before in made))
        interpreter.run(program, given, outputs)
        made.extend(ref(t) for t in outputs.values())

    execute = running.Executable(plan, runner)
    inputs = recorded.inputs(Small(steps), (drawn(4, 8),), {})
    first, second = execute(inputs)[0], execute(inputs)[0]
    assert torch.equal(first, second)
    assert max(alive[:4]) == 0  # what a program made is gone when the next one begins


def test_an_input_of_early_steps_may_be_read_later_as_well():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, table):
            return self.linear(x) * table.cumsum(-1) + table

    module, args = Adds(), (drawn(4, 8, dtype=torch.float32), drawn(4, 8, dtype=torch.float32))
    recorded, plan = planned(module, *args)
    execute = running.Executable(plan)
    inputs = recorded.inputs(module, args, {})
    assert execute.early_inputs == [len(inputs) - 1]
    for early in (None, execute.early(inputs)):
        assert torch.equal(execute(inputs, early)[0], module(*args))


class _Timed(nn.Module):
    """As a block of DiT: it makes waves of the time by itself, and multiplies them by a weight."""

    def __init__(self):
        super().__init__()
        self.linear, self.of_time = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, time):
        waves = time[:, None].float() * torch.exp(torch.arange(4) * -0.5)
        return self.linear(x) * self.of_time(torch.cat([waves.cos(), waves.sin()], -1))[:, None]


def test_waves_of_the_time_are_the_same_in_all_blocks():
    module, args = _Timed(), (drawn(2, 4, 8, dtype=torch.float32), torch.tensor([3, 7]))
    recorded, plan = planned(module, *args)
    execute = running.Executable(plan)
    inputs = recorded.inputs(module, args, {})
    assert execute.early_inputs == [len(inputs) - 1]
    early = execute.early(inputs)
    assert torch.equal(execute(inputs, early)[0], module(*args))
    other = [torch.zeros_like(t) for t in early]  # what was made early is what is multiplied
    assert not torch.equal(execute(inputs, other)[0], module(*args))


def test_rows_for_each_sample_are_not_taken_for_the_time():
    class OfRows(_Timed):
        def forward(self, x, rows):
            return self.linear(x) * self.of_time(rows.cos())[:, None]

    args = drawn(2, 4, 8, dtype=torch.float32), drawn(2, 8, dtype=torch.float32)
    _, plan = planned(OfRows(), *args)
    assert running.Executable(plan).early_inputs == []


class _Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.square = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x):
        y = torch.addmm(self.bias, x, self.weight.t())
        y = y + torch.mm(x, self.weight.t()) + torch.mm(x, self.weight[:, :].t())
        return y + torch.addmm(y, torch.mm(x, self.square.t().t()), self.weight.t())


def test_products_take_no_view_of_a_weight_that_need_not_be_one(monkeypatch):
    """On a GPU without graphs every view is time of the host."""
    module, x = _Products(), torch.randn(5, 4)
    check(module, x)
    recorded, plan = planned(module, x)
    execute, taken = running.Executable(plan), []
    own = torch.Tensor.as_strided
    monkeypatch.setattr(
        torch.Tensor, "as_strided", lambda t, *args: taken.append(t.shape) or own(t, *args)
    )
    with torch.no_grad():
        execute(recorded.inputs(module, (x,), {}))
    # only where what is added is a matrix, which F.linear does not take
    assert [shape for shape in taken if shape == (6, 4)] == [(6, 4)]
    assert (4, 4) not in taken


def _rows(x, weight):
    """What a program makes is read as rows by two products, and returned as it is."""
    y = x * 2 + 1
    rows = y.view(-1, y.shape[-1])
    return y, torch.mm(rows, weight), torch.mm(rows, weight + 1), rows[:3].cumsum(0)


def _transposed(x, weight):
    """Read by one product only, as a matrix that is transposed."""
    return (torch.mm((x[0] * 2).t(), weight[: x.shape[1]]),)


@pytest.mark.parametrize("function", [_rows, _transposed])
def test_results_of_programs_may_be_stored_as_they_are_read(function, monkeypatch):
    args = torch.randn(2, 5, 8), torch.randn(8, 6)
    module = Small(function)
    recorded, plan = planned(module, *args)
    own, views = torch.Tensor.as_strided, {}
    taken: list[torch.Tensor] = []

    def launcher(program, places):
        """As a kernel would: by addresses, whatever the shape of what lies there."""
        shapes = {s.target: (s.shape, s.strides) for s in program.stores}
        shapes |= {n: (plan.values[n].shape, plan.values[n].stride()) for n in program.loads}

        def launch(values):
            lie = {name: own(values[places[name]], *shape) for name, shape in shapes.items()}
            stored = {s.target: lie[s.target] for s in program.stores}
            with monkeypatch.context() as uncounted:
                uncounted.setattr(torch.Tensor, "as_strided", own)
                interpreter.run(program, {name: lie[name] for name in program.loads}, stored)
            return True

        return launch

    for as_read in (False, True):
        taken.clear()
        execute = running.Executable(plan, launchers=launcher, as_read=as_read)
        with monkeypatch.context() as counted:
            counted.setattr(
                torch.Tensor, "as_strided", lambda t, *given: taken.append(t) or own(t, *given)
            )
            outputs = execute(recorded.inputs(module, args, {}))
        views[as_read] = len(taken)
        got, want = recorded.result(outputs), function(*args)
        assert all(map(torch.equal, got, want))
        assert [t.stride() for t in got] == [t.stride() for t in want]
    assert views[True] < views[False]


def split(x, y):
    a, b = (x * 2 + y).cumsum(-1).split([3, 5], 1)
    return (a * y[1, 2]).cumsum(-1), b[:, 1:].transpose(0, 1) + y[:1, 4, None]


def test_a_kernel_is_launched_with_the_addresses_of_its_tensors():
    args = drawn(4, 8, 16), drawn(4, 8, 16)
    module = Small(split)
    recorded, plan = planned(module, *args)
    found, ran = {}, []

    def launcher(program, places):
        def launch(values):
            names = [*program.loads, *(s.target for s in program.stores)]
            found[id(program)] = {name: values[places[name]].data_ptr() for name in names}
            return False

        return launch

    def runner(program, given, outputs):
        tensors = {**given, **outputs}
        assert found[id(program)] == {name: t.data_ptr() for name, t in tensors.items()}
        interpreter.run(program, given, outputs)
        ran.append(program)

    executable = running.Executable(plan, runner, launchers=launcher)
    got = recorded.result(executable(recorded.inputs(module, args, {})))
    assert all(map(torch.equal, got, module(*args)))
    assert ran == programs(plan)


def test_a_program_is_not_launched_with_an_address_that_no_vector_begins_at():
    launched, given = object.__new__(Launched), []
    launched.places = [("a", 0, 16), ("b", 8, 4)]
    launched.launch = given.append
    x = torch.zeros(64)
    run = launched.bound({"a": 0, "b": 1})
    assert run([x, x])
    assert given == [[x.data_ptr(), x.data_ptr() + 8]]
    assert not run([x[1:], x])
    assert len(given) == 1
    one = object.__new__(Launched)
    one.places, one.launch = [("a", 4, 4)], given.append
    assert one.bound({"a": 0})([x])
    assert given[1] == [x.data_ptr() + 4]


def test_an_op_that_is_not_known_stays_pytorchs():
    plan = check(Small(lambda x: (x * 2).cumsum(-1) + 1), drawn(3, 8))
    assert plan.left == {"aten.cumsum.default": 1}
    assert len(programs(plan)) == 2


VIEWS = {
    "slice": lambda x: x[:, 1:7:2, 3:] + 1,
    "select": lambda x: x[1:, -1] * x[:-1, 2],
    "permute": lambda x: x.permute(2, 0, 1) + 1,
    "expand": lambda x: x[:, :1].expand(-1, 5, -1) * 2,
    "split": lambda x: torch.cat([p * i for i, p in enumerate(x.split([3, 1, 4], 1))], 1),
    "padding": lambda x: F.pad(x * 2, (0, 1), value=0.3) + 1,
    "padding of several": lambda x: F.pad(x * 2, (2, 0, 1, 3)) - 1,
    "padding that is stored": lambda x: F.pad(x.float().transpose(1, 2), (0, 0, 0, 1), value=1.0),
    "stack": lambda x: torch.stack([x + 1, x * 2, -x], 1).flatten(1, 2),
    "repeat": lambda x: x.repeat(1, 2, 1) + 1,
    "unflatten": lambda x: (x.unflatten(-1, (3, 4)).transpose(1, 2) * 2).reshape(4, -1),
    "where": lambda x: torch.where(x > 0, x, x * 0.5),
    "mean": lambda x: x.float().pow(2).mean(-1, keepdim=True),
    "sum of two": lambda x: (x.float().unflatten(-1, (-1, 2)) * 2).sum(-1),
    "chained norms": lambda x: F.layer_norm(F.layer_norm(x, (12,)) + 1, (12,)),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_and_moves(name, dtype):
    check(Small(VIEWS[name]), drawn(4, 8, 12, dtype=dtype))


@pytest.mark.parametrize("x", [torch.arange(12).view(3, 4), drawn(3, 8)], ids=["int", "cut"])
def test_other_padding_stays_pytorchs(x):
    borders = (0, 2) if x.dtype == torch.int64 else (-1, 2)
    plan = check(Small(lambda x: F.pad(x, borders).float() * 2 + 1), x)
    assert plan.left == {"aten.constant_pad_nd.default": 1}


def test_inputs_of_any_strides():
    x = drawn(6, 32, 5).transpose(1, 2)[1:, ::2]
    check(Small(lambda x: F.layer_norm(x * 2, (32,)) + x), x)


def test_a_value_read_on_the_host_cannot_be_recorded():
    with pytest.raises(CannotRecord):
        planned(Small(lambda x: x * x.sum().item()), drawn(4))


def test_a_branch_on_a_tensor_cannot_be_recorded():
    with pytest.raises(CannotRecord):
        planned(Small(lambda x: x + 1 if x.sum() > 0 else x), drawn(4))


def test_random_numbers_cannot_be_recorded():
    with pytest.raises(CannotRecord, match="random"):
        planned(Small(lambda x: x + torch.rand_like(x)), drawn(4))


def test_a_tensor_subclass_cannot_be_recorded():
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(CannotRecord, match="TwoTensor"):
        planned(Small(lambda x: x + 1), TwoTensor(drawn(4), drawn(4)))


def test_a_plan_can_be_read():
    recorded, plan = planned(Small(lambda x: F.layer_norm(x, (8,)) + 1), drawn(2, 8))
    assert list(readable.lines(plan, recorded)) == [
        "program 1 [d0: 2 x d1: 8]; rows of 8 in F.layer_norm's order",
        "  add[d0, d1] = (native_layer_norm(input0[d0, d1], 1e-05) + 1)  bfloat16",
    ]


def test_a_gradient_of_gelu_is_broadcast():
    """PyTorch's op on a CPU takes operands of one shape in 16 bits."""

    def forward(gradient, x):
        return torch.ops.aten.gelu_backward(gradient, x.expand_as(gradient)) * 2

    plan = check(Small(forward), drawn(2, 7, 64), drawn(2, 1, 64))
    assert len(programs(plan)) == len(plan.steps) == 1


class RotatesActivations(nn.Module):
    """Halves of heads of what an activation gives: 8 elements in a run, which fill no vector."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation

    def forward(self, x, cos, sin):
        a, b = self.activation(x * 1.702).unflatten(-1, (3, 16)).split(8, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("activation", [torch.sigmoid, F.silu, F.gelu, F.softplus, F.mish])
def test_a_cpu_computes_parts_of_an_activation_as_the_whole(activation):
    """In the part of a tensor that fills no vector its sigmoid of float32 has other bits."""
    sizes = (2, 7, 48), (3, 8), (3, 8)
    for seed in range(10):
        given = [drawn(*size, seed=seed, dtype=torch.float32) for size in sizes]
        check(RotatesActivations(activation), *given)
