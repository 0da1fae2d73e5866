"""Rows with gaps between their elements, as those of a transposed matrix: every backend lays its
results out as the fake kernel promises, and computes what it computes for dense rows."""

import torch
from numerics import as_tuple
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelwright.ops.case import Inputs


def with_gaps(arguments):
    """The same values, with the last two dimensions in the other order in memory."""

    def column_major(t):
        if not isinstance(t, torch.Tensor) or t.ndim < 2 or not t.is_floating_point():
            return t
        return t.mT.contiguous().mT

    return {name: column_major(t) for name, t in arguments.items()}


def hold_forward(op, case, backend, device="cpu"):
    dense = case.arguments(Inputs(torch.float32, device))
    given = with_gaps(dense)
    got, wanted = (as_tuple(op.call(a, backend=backend)) for a in (given, dense))
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5, equal_nan=True)
    with FakeTensorMode() as mode:
        fakes = {
            n: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for n, a in given.items()
        }
        promised = as_tuple(op.call(fakes, backend=backend))
    assert [g.stride() for g in got] == [p.stride() for p in promised]


def gradients(op, arguments, backend):
    leaves = {
        n: t.detach().clone().requires_grad_()
        for n, t in arguments.items()
        if isinstance(t, torch.Tensor) and t.is_floating_point()
    }
    outs = as_tuple(op.call(arguments | leaves, backend=backend))
    own = torch.Generator().manual_seed(0)
    weights = [torch.randn(o.shape, generator=own).to(o) for o in outs]
    total = sum((o * w).sum() for o, w in zip(outs, weights, strict=True) if o.requires_grad)
    return torch.autograd.grad(total, list(leaves.values()), allow_unused=True)


def hold_gradients(op, case, backend, device="cpu"):
    dense = case.arguments(Inputs(torch.float32, device))
    got, wanted = (gradients(op, a, backend) for a in (with_gaps(dense), dense))
    for g, w in zip(got, wanted, strict=True):
        assert (g is None) == (w is None)
        if g is not None:
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
