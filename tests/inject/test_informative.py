"""Which values prove something about a comparison."""

import pytest
import torch

from kernelwright.inject.runtime.informative import Uninformative, informative

ONES, ZEROS = torch.ones(64), torch.zeros(64)


@pytest.mark.parametrize("bad", [ZEROS, ONES * float("nan"), ONES * float("inf")])
def test_zeros_nan_and_infinity_prove_nothing(bad):
    assert informative(ONES, ONES.bfloat16())
    assert not informative(ONES, bad)
    assert not informative(bad.half(), ONES)


def test_one_bad_element_in_many_and_few_nonzeros():
    few = ZEROS.clone()
    few[:3] = 1
    assert not informative(few)
    few[3] = 1  # a sixteenth of them
    assert informative(few)
    few[3] = float("nan")
    assert not informative(few)


def test_what_has_no_floats_is_no_obstacle():
    assert informative(torch.zeros(4, dtype=torch.int64), None, torch.empty(0), "text")


def test_sites_are_named_and_looked_at_before_they_are_overwritten():
    found, x = Uninformative(), ONES.clone()
    found.look_at("sum", [x])
    x.zero_()  # a kernel that writes over its operand
    found.look_at("norm", [x, ONES])
    assert "norm" in found
    assert "sum" not in found
    assert found
    found.look_at("sum", [x])
    assert "sum" in found


def test_nothing_is_read_until_somebody_asks(monkeypatch):
    read = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: read.append(t) or tolist(t))
    found = Uninformative()
    for name in ("a", "b", "c"):
        found.look_at(name, [ONES, ZEROS])
    assert not read
    assert found
    assert len(read) == 2
