"""Calls that PyTorch transforms: derivatives of derivatives, tangents, torch.func, turned signs."""

import inspect

import pytest
import torch
from declared import ALL, OPS, every_op, full, tensors
from numerics import as_tuple, run, widened
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import kernelwright
from kernelwright.ops.case import Inputs
from kernelwright.ops.fp8 import QUANTIZE
from kernelwright.ops.transforms import transformed

# its gradients are those of PyTorch's kernels, which have none themselves
TWICE = [op for op in ALL if op.name != "attention"]


def in_float64(op, **how):
    """A function of the floating tensors of an op's fullest case, and those tensors."""
    arguments = {n: widened(a) for n, a in full(op).arguments(Inputs(torch.float32)).items()}
    given = {n: t for n, t in tensors(arguments).items() if t.is_floating_point()}

    def function(*values):
        return op.call(arguments | dict(zip(given, values, strict=True)), **how)

    def reference(*values):
        return run(op, op.reference, arguments | dict(zip(given, values, strict=True)))

    return function, reference, [t.detach().clone() for t in given.values()]


def loss(function):
    """A number of which no derivative is zero: the sum of cubes."""
    return lambda *values: sum(o.pow(3).sum() for o in as_tuple(function(*values)))


def close(got, expected):
    for g, e in zip(as_tuple(got), as_tuple(expected), strict=True):
        torch.testing.assert_close(g, e)


@every_op(TWICE)
def test_the_second_derivative_is_the_derivative_of_the_first(op):
    function, _, values = in_float64(op)
    values = tuple(v.requires_grad_() for v in values)
    assert torch.autograd.gradgradcheck(function, values, fast_mode=True)


def test_the_second_derivative_of_gelu_is_the_one_of_pytorch():
    found = []
    for gelu in (kernelwright.gelu, lambda x: torch.nn.functional.gelu(x, approximate="tanh")):
        x = torch.linspace(-2, 2, 12, dtype=torch.float64).requires_grad_()
        (first,) = torch.autograd.grad(gelu(x).pow(2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
        (third,) = torch.autograd.grad(second.sum(), x)
        found.append((first, second, third))
    close(*found)


@every_op(TWICE)
def test_a_gradient_to_be_differentiated_has_the_bits_of_one_that_is_not(op):
    found = []
    for create_graph in (False, True):
        arguments = full(op).arguments(Inputs(torch.bfloat16))
        wanted = {n: t.clone() for n, t in tensors(arguments).items() if t.is_floating_point()}
        wanted = {n: t.requires_grad_() for n, t in wanted.items()}
        outputs = as_tuple(op.call(arguments | wanted))
        incoming = [torch.ones_like(o) for o in outputs]
        found.append(
            torch.autograd.grad(outputs, list(wanted.values()), incoming, create_graph=create_graph)
        )
    assert all(map(torch.equal, *found))


def test_an_argument_made_of_another_is_counted_once():
    def second(residual_of):
        x = torch.linspace(-1, 1, 8, dtype=torch.float64)[None].requires_grad_()
        y = residual_of(x, x.sin())
        (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)

    close(second(kernelwright.gated_residual), second(torch.add))


def test_attention_says_that_its_gradient_has_none():
    """PyTorch's fused kernels do; its "math" is twice differentiable."""
    op = next(op for op in ALL if op.name == "attention")
    function, _, values = in_float64(op, backend="math")
    assert torch.autograd.gradgradcheck(
        function, tuple(v.requires_grad_() for v in values), fast_mode=True
    )
    function, _, values = in_float64(op)
    values = [v.requires_grad_() for v in values]
    first = torch.autograd.grad(loss(function)(*values), values, create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivative for .*attention.* is not implemented"):
        torch.autograd.grad(sum(g.sum() for g in first), values)


@every_op()
def test_tangents_are_carried_through(op):
    function, reference, values = in_float64(op)
    tangents = [torch.ones_like(v) for v in values]
    expected = torch.func.jvp(
        reference if op.name != "attention" else in_float64(op, backend="math")[0],
        tuple(values),
        tuple(tangents),
    )
    for recorded in (False, True):
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(v.clone().requires_grad_(recorded), t)
                for v, t in zip(values, tangents, strict=True)
            ]
            assert transformed(duals)
            got = [forward_ad.unpack_dual(o) for o in as_tuple(function(*duals))]
        close(tuple(g.primal for g in got), expected[0])
        close(tuple(g.tangent for g in got), expected[1])
    close(torch.func.jvp(function, tuple(values), tuple(tangents))[1], expected[1])


@every_op(OPS)
def test_a_level_without_tangents_changes_nothing(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    expected = op.call(arguments, backend="torch")
    with forward_ad.dual_level():
        assert all(map(torch.equal, as_tuple(op.call(arguments)), as_tuple(expected)))


@every_op()
def test_torch_func_takes_the_gradient(op):
    function, _, values = in_float64(op)
    wanted = tuple(range(len(values)))
    got = torch.func.grad(loss(function), wanted)(*values)
    leaves = [v.requires_grad_() for v in values]
    close(got, torch.autograd.grad(loss(function)(*leaves), leaves))


@every_op()
def test_vmap_gives_what_a_loop_gives(op):
    function, _, values = in_float64(op)
    several = [torch.stack([v, v * 0.5, -v]) for v in values]
    got = as_tuple(torch.vmap(function)(*several))
    alone = [as_tuple(function(*each)) for each in zip(*several, strict=True)]
    close(got, tuple(torch.stack(outs) for outs in zip(*alone, strict=True)))
    # of the first alone, and of the incoming gradients
    got = torch.vmap(lambda v: function(v, *values[1:]))(several[0])
    close(as_tuple(got)[0][0], as_tuple(function(*values))[0])
    leaves = [v.requires_grad_() for v in values]
    first = as_tuple(function(*leaves))[0]
    grads = torch.stack([torch.ones_like(first), first.detach()])
    batched = torch.autograd.grad(
        first, leaves[0], grads, is_grads_batched=True, retain_graph=True
    )[0]
    close(batched[1], torch.autograd.grad(first, leaves[0], grads[1])[0])


@every_op([op for op in OPS if "triton" in op.backends])
def test_a_kernel_asked_for_by_name_is_refused_under_a_transform(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    name, first = next(iter(tensors(arguments).items()))
    with pytest.raises(RuntimeError, match=f"^{op.name}: backend 'triton' has no kernel"):
        torch.vmap(lambda t: op.call(arguments | {name: t}, backend="triton"))(first[None])


@every_op([op for op in OPS if not op.inplace])
def test_out_is_refused_under_a_transform(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    name, first = next(iter(tensors(arguments).items()))
    out = as_tuple(op.call(arguments))
    out = out if len(out) > 1 else out[0]
    with pytest.raises(ValueError, match=f"^{op.name}: out= cannot be"):
        torch.vmap(lambda t: op.call(arguments | {name: t}, out=out))(first[None])


@pytest.mark.parametrize("recorded", [True, False])
def test_a_compiled_transform_is_the_eager_one(recorded):
    x, t = torch.randn(2, 3, 64, dtype=torch.float64)

    def tangent(x, t):
        return torch.func.jvp(kernelwright.rmsnorm, (x,), (t,))[1]

    def mapped(x, t):
        return torch.vmap(kernelwright.rmsnorm)(x) * t

    with torch.set_grad_enabled(recorded):
        for function in (tangent, mapped):
            torch._dynamo.reset()
            got = torch.compile(function, backend="aot_eager", fullgraph=True)(x, t)
            close(got, function(x, t))
            assert got.abs().sum()


BACKENDS = ["torch", "triton"]


@pytest.mark.usefixtures("rounding_interpreter")
@pytest.mark.parametrize("backend", BACKENDS)
@every_op()
def test_a_negative_view_is_read_with_its_sign(op, backend):
    arguments = full(op).arguments(Inputs(torch.float32))
    floats = {n: t for n, t in tensors(arguments).items() if t.is_floating_point()}
    for name, t in floats.items():
        turned = torch._neg_view(t)
        expected = op.call(arguments | {name: turned.resolve_neg()}, backend=backend)
        # a plan of this layout is there by now
        got = op.call(arguments | {name: turned}, backend=backend)
        assert all(map(torch.equal, as_tuple(got), as_tuple(expected))), name


@every_op(OPS)
def test_a_negative_view_is_not_written_to(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    if op.inplace:
        op.call(arguments, inplace=True, backend="triton")
        given = arguments | {op.inplace[-1]: torch._neg_view(arguments[op.inplace[-1]])}
        name, how = op.inplace[-1], {"inplace": True}
    else:
        outs = [torch.empty_like(o) for o in as_tuple(op.call(arguments))]
        op.call(arguments, out=tuple(outs) if len(outs) > 1 else outs[0], backend="triton")
        outs[-1] = torch._neg_view(outs[-1])
        given, name = arguments, op.outputs[-1]
        how = {"out": tuple(outs) if len(outs) > 1 else outs[0]}
    with pytest.raises(ValueError, match=f"^{op.name}: {name} is a negative view"):
        op.call(given, backend="triton", **how)


@pytest.mark.parametrize("quantity", ["eps", "theta_base", "scale"])
def test_a_number_given_as_a_tensor_is_refused(quantity):
    """A plan keeps numbers: the value of a tensor may change under it."""
    for op in ALL:
        arguments = full(op).arguments(Inputs(torch.float32))
        if isinstance(arguments.get(quantity), torch.Tensor) or (
            quantity not in inspect.signature(getattr(kernelwright, op.name)).parameters
        ):
            continue
        for given in (torch.tensor(1e-3), torch.tensor([1e-3])):
            with pytest.raises(TypeError, match=f"^{op.name}: {quantity} is a tensor"):
                op.call(arguments | {quantity: given})


@every_op()
def test_a_meta_tensor_gives_a_meta_result(op):
    real = as_tuple(op.call(full(op).arguments(Inputs(torch.bfloat16))))
    got = as_tuple(op.call(full(op).arguments(Inputs(torch.bfloat16, "meta"))))
    for g, r in zip(got, real, strict=True):
        assert (g.device.type, g.shape, g.dtype) == ("meta", r.shape, r.dtype)


def test_tables_made_in_a_mode_or_a_transform_are_not_kept():
    x = torch.randn(1, 13, 2, 8)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        kernelwright.rope_1d(fake, fake)
    torch.func.grad(lambda t: kernelwright.rope_1d(t, t)[0].sum())(x)
    got, _ = kernelwright.rope_1d(x, x)
    assert type(got) is torch.Tensor
    assert torch.isfinite(got).all()


def test_rows_in_eight_bits_name_what_is_wrong():
    with pytest.raises(TypeError, match=r"^quantize: x is int, expected a tensor"):
        QUANTIZE.run(3, None, "none", None)
