"""The error bound of the tiers that round differently."""

import math

import pytest
import torch

from kernelwright.inject.verify import accuracy


@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 7), (1, 40)], ids=str)
@pytest.mark.parametrize("piece", [1, 16, accuracy.PIECE])
def test_an_error_is_the_same_in_pieces(shape, piece, monkeypatch):
    torch.manual_seed(0)
    truth, result = torch.randn(shape), torch.randn(shape).bfloat16()
    monkeypatch.setattr(accuracy, "PIECE", piece)
    expected = (result.double() - truth.double()).norm() / truth.double().norm()
    assert math.isclose(accuracy.error(result, truth), expected.item(), rel_tol=1e-12)
    both = accuracy.error((result, truth), (truth, truth))
    assert math.isclose(both, expected.item() / 2**0.5, rel_tol=1e-12)


def test_rows_of_a_wider_tensor_and_none_at_all():
    truth = torch.randn(2, 6, 40)[..., 8:24]
    assert math.isclose(accuracy.error(2 * truth, truth), 1.0)
    assert accuracy.error(truth[:, :0], truth[:, :0]) == 0.0
    assert accuracy.error(truth[..., :0], truth[..., :0]) == 0.0


def test_what_is_not_a_number_is_no_small_error():
    assert math.isnan(accuracy.error(torch.tensor([math.nan, 1.0]), torch.ones(2)))


def test_the_promise_is_five_percent_and_what_few_rows_cannot_tell():
    """With numbers of its own: a wider margin must fail here."""
    many = 10**12
    assert accuracy.holds(many, 1.04, 1.0)
    assert not accuracy.holds(many, 1.06, 1.0)
    assert accuracy.holds(100, 1.15, 1.0)  # 1.05 * (1 + 1/10) is 1.155
    assert not accuracy.holds(100, 1.16, 1.0)
    # if eager has no error, only float32's own is allowed
    assert accuracy.holds(many, 0.9e-5, 0.0)
    assert not accuracy.holds(many, 1.1e-5, 0.0)
    assert not accuracy.holds(many, math.nan, 1.0)


def test_what_was_not_measured_breaks_no_promise():
    assert accuracy.holds(1)
    assert accuracy.holds(1, error=1.0)
    assert accuracy.holds(1, eager_error=0.0)
