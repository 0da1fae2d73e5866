"""Wrong arguments of every kind: the error is ours, opens with the op and names the argument."""

import inspect

import numpy
import pytest
import torch
from declared import every_op, full, tensors

import kernelwright
from kernelwright.ops.case import Inputs


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


def nested(t):
    return torch.nested.nested_tensor([t.flatten(), t.flatten()[:1]])


def jagged(t):
    return torch.nested.nested_tensor([t.flatten(), t.flatten()[:1]], layout=torch.jagged)


TENSORS = {
    "a nested tensor": nested,
    "a jagged tensor": jagged,
    "a nested tensor with a gradient": lambda t: nested(t).requires_grad_(),
    "sparse": lambda t: t.to_sparse(),
    "sparse rows": lambda t: t.reshape(t.shape[0], -1).to_sparse_csr(),
    "sparse with a gradient": lambda t: t.to_sparse().requires_grad_(),
    "for oneDNN": lambda t: t.to_mkldnn(),
    "quantised": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "integers": lambda t: t.to(torch.int64),
    "complex": lambda t: t.to(torch.complex64),
    "complex with a gradient": lambda t: t.to(torch.complex64).requires_grad_(),
    "conjugate": lambda t: t.to(torch.complex64).conj(),
    "eight bits": lambda t: t.to(torch.float8_e4m3fn),
    "no dimensions": lambda t: t.flatten()[0],
    "a list of tensors": lambda t: [t],
    "a list": lambda t: t.tolist(),
    "an array": lambda t: t.numpy(),
    "a number": lambda t: 2,
    "a bool": lambda t: True,
    "text": lambda t: "x" * 1000,
    "a type": lambda t: torch.Tensor,
    "an unprintable object": lambda t: Unprintable(),
}
# for a number, a word or a switch
VALUES = {
    "a tensor": torch.tensor(1e-6),
    "a tensor with a gradient": torch.tensor([1e-6], requires_grad=True),
    "an array": numpy.ones(3),
    "a list": [1e-6],
    "a dictionary": {},
    "text": "small",
    "bytes": b"torch",
    "complex": 1j,
    "a huge number": 10**400,
    "a number that Python does not print": 10**5000,
    "minus a huge number": -(10**400),
    "inf": float("inf"),
    "nan": float("nan"),
    "an unprintable object": Unprintable(),
    "a function": len,
}
SWITCHES = ("exact", "backend", "inplace", "layout")


def said(op, arguments, **how):
    """What the error says that the public function raises."""
    try:
        getattr(kernelwright, op.name)(**arguments, **how)
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing was raised"


def opens_with(text, op, name):
    words = text.replace(",", " ").replace(":", " ").replace(";", " ").split()
    return text.startswith(f"{op.name}: ") and name in words and len(text) < 400


@pytest.mark.parametrize("recorded", [False, True])
@every_op()
def test_a_wrong_tensor_is_named(op, recorded):
    given = full(op).arguments(Inputs(torch.float32))
    for name, t in tensors(given).items():
        for kind, wrong in TENSORS.items():
            value = wrong(t.contiguous().float())
            arguments = given | {name: value}
            for other, o in tensors(given).items():
                if recorded and other != name and o.is_floating_point():
                    arguments[other] = o.detach().clone().requires_grad_()
            text = said(op, arguments)
            assert opens_with(text, op, name), (name, kind, text)


@every_op()
def test_a_wrong_value_is_named(op):
    given = full(op).arguments(Inputs(torch.float32))
    # what defaults to None may be a tensor as well
    plain = [n for n, a in given.items() if isinstance(a, bool | int | float | str)]
    for name in plain:
        for kind, wrong in VALUES.items():
            text = said(op, given | {name: wrong})
            assert opens_with(text, op, name), (name, kind, text)
        wrong = "yes" if isinstance(given[name], bool) else True
        text = said(op, given | {name: wrong})
        assert opens_with(text, op, name), (name, wrong, text)


@pytest.mark.parametrize("recorded", [False, True])
@every_op()
def test_a_wrong_switch_is_named(op, recorded):
    given = full(op).arguments(Inputs(torch.float32))
    if recorded:
        given |= {
            n: t.detach().clone().requires_grad_()
            for n, t in tensors(given).items()
            if t.is_floating_point()
        }
    taken = inspect.signature(getattr(kernelwright, op.name)).parameters
    for name in SWITCHES:
        if name not in taken:
            continue
        for kind, wrong in (VALUES | {"nothing": "", "two": 2}).items():
            text = said(op, {n: a for n, a in given.items() if n != name}, **{name: wrong})
            assert opens_with(text, op, name), (name, kind, text)


@every_op()
def test_a_wrong_output_is_named(op):
    given = full(op).arguments(Inputs(torch.float32))
    taken = inspect.signature(getattr(kernelwright, op.name)).parameters
    for name in ("out", "residual_out"):
        if name not in taken:
            continue
        right = op.call(given)
        right = right[op.outputs.index(name)] if isinstance(right, tuple) else right
        wrong = {kind: make(right) for kind, make in TENSORS.items()}
        wrong |= {"a tuple": (right,), "two": (right, right), "False": False, "zero": 0}
        for kind, value in wrong.items():
            text = said(op, given, **{name: value})
            assert opens_with(text, op, name), (name, kind, text)


@every_op()
def test_meta_beside_another_device_is_named(op):
    given = full(op).arguments(Inputs(torch.float32))
    names = list(tensors(given))
    for name in names if len(names) > 1 else ():
        text = said(op, given | {name: given[name].to("meta")})
        assert any(opens_with(text, op, n) for n in names), (name, text)
