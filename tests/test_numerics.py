"""The error bound works: it catches a worse kernel and an unwritten element."""

import math

import pytest
import torch
from declared import DTYPES
from numerics import Error, as_good_as_eager, ulp

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def neighbour(value, dtype):
    """The next number of `dtype` away from zero."""
    start = torch.tensor(value, dtype=dtype)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return (start.view(bits) + 1).view(dtype).double() - start.double()


@every_dtype
def test_an_ulp_is_the_distance_to_the_next_number(dtype):
    info = torch.finfo(dtype)
    for value in (1.0, 1.5, 3.0, 1000.0, 0.1, info.smallest_normal, info.smallest_normal / 4, 0.0):
        value = torch.tensor(value, dtype=dtype).item()
        for signed in (value, -value):
            there = torch.tensor(signed, dtype=torch.float64)
            assert ulp(there, dtype) == neighbour(value, dtype), signed
    assert ulp(torch.tensor(math.inf, dtype=torch.float64), dtype) == 0


@every_dtype
def test_one_rounding_passes_and_two_do_not(dtype):
    truth = torch.randn(100, dtype=torch.float64)
    exact = truth.to(dtype)
    as_good_as_eager(exact, truth, exact)
    step = ulp(truth, dtype) * truth.sign()
    as_good_as_eager((exact.double() + step).to(dtype), truth, exact)
    with pytest.raises(AssertionError, match="over the bar"):
        as_good_as_eager((exact.double() + 3 * step).to(dtype), truth, exact)


def test_an_error_of_eager_is_allowed_and_no_larger_one():
    truth = torch.linspace(1, 2, 64, dtype=torch.float64)
    eager = (truth + 1e-3).float()
    as_good_as_eager(truth.float() - 1e-3, truth, eager)
    worse = truth.float()
    worse[7] += 2e-3
    with pytest.raises(AssertionError, match=r"output 1 at \(7,\)"):
        as_good_as_eager((truth.float(), worse), (truth, truth), (eager, eager))


def test_nan_must_be_where_the_truth_has_it():
    truth = torch.tensor([1.0, math.nan, 3.0], dtype=torch.float64)
    as_good_as_eager(truth.float(), truth, truth.float())
    for got in ([1.0, 2.0, 3.0], [math.nan, math.nan, 3.0]):
        with pytest.raises(AssertionError, match="NaN in other places"):
            as_good_as_eager(torch.tensor(got), truth, truth.float())


def test_what_float16_cannot_hold_is_infinite():
    truth = torch.tensor([1e5, -1e5, 1.0], dtype=torch.float64)
    as_good_as_eager(truth.half(), truth, truth.half())
    with pytest.raises(AssertionError, match="over the bar"):
        as_good_as_eager(torch.tensor([65504.0, -1e9, 1.0]).half(), truth, truth.half())
    with pytest.raises(AssertionError, match="over the bar"):
        as_good_as_eager(torch.tensor([1e5, -1e5, math.inf]).half(), truth, truth.half())


def test_an_eager_chain_that_overflows_excuses_nothing():
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert Error.of(torch.tensor([math.inf, 2.0]), truth) == Error()
    with pytest.raises(AssertionError, match="over the bar"):
        as_good_as_eager(torch.tensor([5.0, 2.0]), truth, torch.tensor([math.inf, 2.0]))


@every_dtype
def test_new_memory_is_poisoned(dtype):
    made = torch.empty(4, dtype=dtype)
    for t in (made, torch.empty_like(made), made.new_empty(4), torch.empty_strided((4,), (1,))):
        assert t.isnan().all()
