"""A wrong call raises a ValueError or TypeError that names the op and the argument, and no more."""

import pytest
import torch
from declared import ALL, OPS, every_op, full, tensors
from numerics import as_good_as_eager, in_eager, in_float64

import kernelwright
from kernelwright.ops import checks
from kernelwright.ops.case import Inputs

WRONG = {
    "integers": lambda t: t.to(torch.int32),
    "complex": lambda t: t.to(torch.complex64),
    "sparse": lambda t: t.to_sparse(),
    "another device": lambda t: t.to("meta"),
    "another width": lambda t: torch.cat((t, t[..., :3]), -1),
    "no dimensions": lambda t: t.flatten()[0],
    "a number": lambda t: 3,
    "a list": lambda t: t.tolist(),
    "an array": lambda t: t.numpy(),
    "text": lambda t: "tensor",
}


def every_tensor():
    """Each op with each tensor argument that any of its cases gives."""
    found = []
    for op in ALL:
        names = tensors(full(op).arguments(Inputs(torch.float32)))
        found += [pytest.param(op, n, id=f"{op.name}-{n}") for n in names]
    return pytest.mark.parametrize(("op", "name"), found)


@pytest.mark.parametrize("wrong", WRONG)
@every_tensor()
def test_a_wrong_tensor_is_named(op, name, wrong):
    arguments = full(op).arguments(Inputs(torch.float32))
    if wrong == "another device" and len(tensors(arguments)) == 1:
        return  # one tensor has no other device to differ from
    arguments[name] = WRONG[wrong](arguments[name])
    said = refused(op, arguments)
    if wrong == "another width" and said is None:
        # a width that is the argument's own, as attention's value has: then the answer is right
        as_good_as_eager(op.call(arguments), in_float64(op, arguments), in_eager(op, arguments))
    else:
        assert names(said, op, name), said
    lives_on(op)


def refused(op, arguments):
    """The error that a call raises, or None."""
    try:
        op.call(arguments)
    except (ValueError, TypeError) as error:
        return error
    return None


def names(error, op, *arguments):
    """The message opens with the op, and says one of the arguments as a word."""
    text = str(error)
    words = text.replace(",", " ").replace(":", " ").replace(";", " ").split()
    return text.startswith(f"{op.name}: ") and any(a in words for a in arguments)


def lives_on(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    op.call(arguments)


@every_tensor()
def test_a_missing_tensor_is_named_where_it_is_needed(op, name):
    arguments = full(op).arguments(Inputs(torch.float32)) | {name: None}
    said = refused(op, arguments)
    assert said is None or names(said, op, name), said


# what a parameter must not be, by the type of what a case gives for it
OF_TYPE = {
    bool: ("yes", 2, None),
    str: ("neither", 1, None),
    int: ("two", 1.5, -2, None),
    float: ("small", float("nan")),
}
# and by its meaning
NAMED = {
    "eps": (-1e-6, float("inf"), None),
    "theta_base": (0.0, -1e4, float("inf"), None),
    "num_frames": (0, 7),
    "rope_dim_t": (3, 10),
}


def every_parameter():
    found = []
    for op in ALL:
        for name, given in full(op).arguments(Inputs(torch.float32)).items():
            wrong = (*OF_TYPE.get(type(given), ()), *NAMED.get(name, ()))
            found += [pytest.param(op, name, w, id=f"{op.name}-{name}-{w}") for w in wrong]
    return pytest.mark.parametrize(("op", "name", "value"), found)


@every_parameter()
def test_a_wrong_value_is_named(op, name, value):
    arguments = full(op).arguments(Inputs(torch.float32)) | {name: value}
    with pytest.raises((ValueError, TypeError)) as caught:
        op.call(arguments)
    assert names(caught.value, op, name), str(caught.value)
    lives_on(op)


@every_op(OPS)
def test_a_chain_nobody_declared_is_named(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    with pytest.raises(ValueError, match=f"^{op.name}: exact is 'jax', known chains are"):
        op.call(arguments, exact="jax")


@every_op(ALL)
def test_a_backend_nobody_declared_is_named(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    for value in ("metal", "", 3):
        with pytest.raises(ValueError, match=r"backend is .*, expected one of"):
            op.call(arguments, backend=value)


def test_use_backend_names_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"^use_backend: backend is 'metal'"):
        kernelwright.use_backend("metal").__enter__()


@every_op([op for op in ALL if "cuda" in op.backends])
def test_cuda_asked_for_by_name_never_falls_back(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    with pytest.raises(ValueError, match="backend 'cuda': tensors are on cpu"):
        op.call(arguments, backend="cuda")


@every_op([op for op in OPS if op.exact and "triton" in op.backends])
def test_triton_is_refused_where_bits_are_asked_for(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    with pytest.raises(ValueError, match=f"^{op.name}: backend 'triton': .*order of a sum"):
        op.call(arguments, backend="triton", exact=next(iter(op.exact)))


@every_op([op for op in OPS if "triton" in op.backends])
def test_float64_is_refused_by_kernels_asked_for_by_name(op):
    arguments = {
        n: a.double() if isinstance(a, torch.Tensor) else a
        for n, a in full(op).arguments(Inputs(torch.float32)).items()
    }
    with pytest.raises(ValueError, match=f"^{op.name}: backend 'triton': float64"):
        op.call(arguments, backend="triton")


def given_outputs(op, arguments):
    """Tensors that op.call takes as out=, one for each output."""
    return [torch.empty_like(o) for o in op.allocate(*(arguments[n] for n in op.arguments))]


WRONG_OUT = {
    "another shape": lambda o: torch.cat((o, o), 0),
    "another dtype": lambda o: o.to(torch.float16 if o.dtype != torch.float16 else torch.float32),
    "another device": lambda o: o.to("meta"),
    "gaps in its rows": lambda o: torch.empty(*o.shape, 2, dtype=o.dtype)[..., 0],
    "a recorded tensor": lambda o: o.requires_grad_(),
    "an expanded tensor": lambda o: o[:1].expand(o.shape),
    "no tensor": lambda o: "out",
}


@pytest.mark.parametrize("wrong", WRONG_OUT)
@every_op([op for op in OPS if not op.inplace])
def test_a_wrong_output_is_named(op, wrong):
    arguments = full(op).arguments(Inputs(torch.float32))
    for i, name in enumerate(op.outputs):
        out = given_outputs(op, arguments)
        out[i] = WRONG_OUT[wrong](out[i])
        with pytest.raises((ValueError, TypeError)) as caught:
            op.call(arguments, out=tuple(out) if len(out) > 1 else out[0])
        assert names(caught.value, op, name), str(caught.value)
    lives_on(op)


@every_op([op for op in OPS if not op.inplace])
def test_out_is_refused_where_autograd_records(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    first = next(iter(tensors(arguments)))
    out = given_outputs(op, arguments)
    arguments[first] = arguments[first].detach().clone().requires_grad_()
    with pytest.raises(ValueError, match=f"^{op.name}: out= cannot be recorded"):
        op.call(arguments, out=tuple(out) if len(out) > 1 else out[0])


WRONG_PLACE = {
    "an expanded tensor": lambda t: t[:1].expand(t.shape),
    "gaps in its rows": lambda t: t.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("wrong", WRONG_PLACE)
@every_op([op for op in OPS if op.inplace])
def test_a_tensor_that_cannot_be_written_in_place_is_named(op, wrong):
    for name in op.inplace:
        arguments = full(op).arguments(Inputs(torch.float32))
        arguments[name] = WRONG_PLACE[wrong](arguments[name])
        op.call(arguments)
        with pytest.raises(ValueError, match=rf"^{op.name}: (.* )?{name} ") as caught:
            op.call(arguments, inplace=True)
        assert names(caught.value, op, name), caught.value


@pytest.mark.parametrize("backend", ["torch", "triton"])
@every_op([op for op in OPS if len(op.inplace) > 1])
def test_two_tensors_at_one_address_are_refused_in_place(op, backend):
    arguments = full(op).arguments(Inputs(torch.float32))
    first, second = op.inplace
    arguments[second] = arguments[first]
    with pytest.raises(ValueError, match=rf"^{op.name}: {first} and {second} begin at the same"):
        op.call(arguments, inplace=True, backend=backend)


@pytest.mark.parametrize("kind", ["int?", "float?", "bool?", "str?"])
def test_an_optional_number_or_word_is_none_or_of_its_kind(kind):
    right = {"int?": 2, "float?": 0.5, "bool?": True, "str?": "first"}[kind]
    for value in (None, right):
        checks.kinds("op", [("groups", kind)], [value])
    with pytest.raises((TypeError, ValueError), match=r"^op: groups is \[\], expected .* or None"):
        checks.kinds("op", [("groups", kind)], [[]])
