"""Exact calls run kernels, all but those that are known to have none."""

from types import SimpleNamespace

import pytest
from declared import DTYPES, every_op, small
from exact_kernels import EXACT, IN_FLOAT32, WIDTHS, WITH_QUACK, has_kernel, promotes, refused

from kernelwright.backends import Unsupported
from kernelwright.checking.promises import promises
from kernelwright.ops import ways
from kernelwright.ops.row.order import aten_order

CHAINS = [pytest.param(op, chain, id=f"{op.name}-{chain}") for op in EXACT for chain in op.exact]


@pytest.mark.parametrize("way", ways.RMS_NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "chain"), CHAINS)
def test_an_exact_call_has_a_kernel_unless_it_is_known_to_have_none(op, chain, dtype, way):
    """Whichever kernel PyTorch's F.rms_norm is."""
    for case in small(op):
        if not promotes(op, case, chain, dtype):
            with ways.assuming("F.rms_norm", way):
                why = refused(op, case, chain, dtype)
                assert (why is None) == has_kernel(op, case, chain, dtype), f"{case.name}: {why}"


def test_what_is_known_to_have_none_is_declared():
    chains = {(op.name, chain): {c.name for c in small(op)} for op in EXACT for chain in op.exact}
    for known in (WIDTHS, IN_FLOAT32, WITH_QUACK):
        for chain, cases in known.items():
            assert set(cases) <= chains[chain], chain
            assert chains[chain] - set(cases), f"{chain} has no kernel at all"


@pytest.mark.parametrize("width", [4, 12, 100, 1540])
def test_the_order_of_rms_norm_is_known_for_every_multiple_of_four(width):
    """No declared case has a width that is one of four and none of eight."""
    assert aten_order(width, "TorchRms", room=8).vector == 4


def kept_by_a_kernel(op):
    return [p.broken() for p in promises(op) if p.name.endswith("a kernel keeps its bits")]


@every_op(EXACT)
def test_a_check_notices_if_every_exact_call_is_left_to_eager(op, monkeypatch):
    """Eager has its own bits: all other promises of exact calls hold without any kernel."""
    assert kept_by_a_kernel(op) == [None] * len(op.exact)
    plan = op.kernels.cuda

    def inexact_alone(call):
        if call.exact:
            raise Unsupported("not today")
        return plan(call)

    monkeypatch.setattr(op, "kernels", SimpleNamespace(cuda=inexact_alone))
    assert all("no case has a kernel" in why for why in kept_by_a_kernel(op))
