"""The functions generated for an op and a plan: what they pass on, without a GPU to launch on."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from declared import OPS, every_op, full, tensors
from numerics import as_tuple

from kernelwright.backends.triton import interpreting
from kernelwright.ops.call_codegen import compile_call, compile_follow
from kernelwright.ops.case import Inputs
from kernelwright.ops.op import registry
from kernelwright.ops.plan import How, LaunchPlan, on_device

needs_plans = pytest.mark.skipif(not interpreting(), reason="a GPU is here: plans launch on it")
LAUNCHED = [op for op in OPS if "triton" in op.backends]
INPLACE = [op for op in LAUNCHED if op.inplace]


def planned(op, args, inplace=False):
    """A plan as a GPU has it, but for the launch: that notes the addresses."""
    plan = LaunchPlan(op, args, None, How(None, "triton", inplace, strict=True), 16)
    launched = []
    plan.mask, plan.launch = 15, lambda addresses: launched.append(list(addresses))
    plan.follow = compile_follow(plan)
    return plan, launched


def arguments_of(op):
    """Those of its fullest case, in memory of their own: it begins at a multiple of 64."""
    arguments = full(op).arguments(Inputs(torch.float32))
    arguments |= {n: t.clone() for n, t in tensors(arguments).items()}
    return tuple(arguments[n] for n in op.arguments)


def shifted(t):
    """The same values, four bytes past a multiple of 16."""
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)


@needs_plans
@every_op(LAUNCHED)
def test_a_launch_gets_the_addresses_in_the_order_of_the_kernel(op):
    args = arguments_of(op)
    plan, launched = planned(op, args)
    result = plan.follow(args, None)
    values = dict(zip((*op.arguments, *op.outputs), (*args, *as_tuple(result)), strict=True))
    assert launched == [[values[n].data_ptr() for n in plan.pointers]]
    given = as_tuple(plan.follow(args, result))
    assert all(g is r for g, r in zip(given, as_tuple(result), strict=True))
    assert launched[1] == launched[0]


@needs_plans
@every_op(LAUNCHED)
def test_addresses_off_the_alignment_get_a_plan_of_their_own(op, monkeypatch):
    args = arguments_of(op)
    plan, launched = planned(op, args)
    asked = []

    def other(args, outs, how, alignment):
        asked.append((alignment, how))
        return lambda args, out: out

    monkeypatch.setattr(op, "launch_plan", other)
    first = next(i for i, a in enumerate(args) if isinstance(a, torch.Tensor))
    moved = (*args[:first], shifted(args[first]), *args[first + 1 :])
    made = as_tuple(plan.follow(moved, None))
    given = as_tuple(plan.follow(moved, made if len(made) > 1 else made[0]))
    assert all(g is m for g, m in zip(given, made, strict=True))
    assert len(made) == len(op.outputs)
    assert asked == [(4, plan.how)]
    assert launched == []


@needs_plans
@every_op(INPLACE)
def test_in_place_the_arguments_are_the_outputs(op):
    args = arguments_of(op)
    plan, launched = planned(op, args, inplace=True)
    changed = tuple(args[op.arguments.index(n)] for n in op.inplace)
    got = as_tuple(plan.follow(args, None))
    assert len(got) == len(changed)
    assert all(g is c for g, c in zip(got, changed, strict=True))
    values = dict(zip((*op.arguments, *op.outputs), (*args, *changed), strict=True))
    assert launched == [[values[n].data_ptr() for n in plan.pointers]]


@needs_plans
@every_op([op for op in INPLACE if len(op.inplace) > 1])
def test_in_place_two_tensors_at_one_address_are_never_launched(op):
    args = list(arguments_of(op))
    plan, launched = planned(op, tuple(args), inplace=True)
    first, second = (op.arguments.index(n) for n in op.inplace)
    args[second] = args[first]
    with pytest.raises(ValueError, match=f"^{op.name}: .* begin at the same address"):
        plan.follow(tuple(args), None)
    assert launched == []


@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_on_another_gpu_than_the_current_one_goes_there(current, monkeypatch):
    entered, launched = [], []

    @contextmanager
    def device(where):
        entered.append(where)
        yield

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    there = torch.device("cuda", 1)
    on_device(there, launched.append)((16, 32))
    assert launched == [(16, 32)]
    assert entered == ([] if current == 1 else [there])


def test_arguments_may_have_any_name():
    """Names that the generated text uses itself, too."""
    plans = {}
    op = SimpleNamespace(name="odd", _plans=plans, slow_call=lambda *given: ("slow", given))
    kinds = ["Tensor", "Tensor?", "float", "str"]
    call = compile_call(op, list(zip(["args", "key", "plan", "type_"], kinds, strict=True)))
    x, how = torch.ones(2), (None, None, "torch", False)
    args = (x, None, 0.5, "text")
    assert call(*args, backend="torch") == ("slow", (args, *how))
    layout = x.shape, True, x.dtype, x.device
    plans[(None, "torch", False, *layout, None, 0.5, "text")] = lambda args, out: ("fast", args)
    assert call(*args, backend="torch") == ("fast", args)
    assert call(x, x, 0.5, "text", backend="torch")[0] == "slow"
    assert call(x.clone().requires_grad_(), None, 0.5, "text", backend="torch")[0] == "slow"
    assert call(x, None, [], "text", backend="torch")[0] == "slow"


@pytest.mark.usefixtures("rounding_interpreter")
def test_only_strides_along_which_a_kernel_moves_are_part_of_the_key():
    plain = torch.randn(4, 1, 16)
    alone = torch.randn(4, 3, 16)[:, 0].contiguous().as_strided((4, 1, 16), (16, 7, 1))
    apart = torch.randn(4, 3, 16)[:, :1]
    op = registry()["rmsnorm"]
    op.forget()
    for x, plans in ((plain, 1), (alone, 1), (apart, 2)):
        assert torch.equal(
            op.run(x, None, 1e-6, backend="triton"), op.run(x.clone(), None, 1e-6, backend="triton")
        )
        assert len(op._plans) == plans


@every_op(OPS)
def test_a_call_with_too_few_arguments_names_the_op_and_what_is_missing(op):
    with pytest.raises(TypeError, match=rf"{op.name}\(\) missing .*'{op.arguments[-1]}'"):
        op.run(*arguments_of(op)[:-1])
