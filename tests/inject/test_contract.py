"""The error that the tiers which round differently are held to."""

import math

import pytest
import torch

from kernelwright.inject import contract


@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 7), (1, 40)], ids=str)
@pytest.mark.parametrize("piece", [1, 16, contract.PIECE])
def test_an_error_is_the_same_in_pieces(shape, piece, monkeypatch):
    torch.manual_seed(0)
    truth, result = torch.randn(shape), torch.randn(shape).bfloat16()
    monkeypatch.setattr(contract, "PIECE", piece)
    expected = (result.double() - truth.double()).norm() / truth.double().norm()
    assert math.isclose(contract.error(result, truth), expected.item(), rel_tol=1e-12)
    both = contract.error((result, truth), (truth, truth))
    assert math.isclose(both, expected.item() / 2**0.5, rel_tol=1e-12)


def test_rows_of_a_wider_tensor_and_none_at_all():
    truth = torch.randn(2, 6, 40)[..., 8:24]
    assert math.isclose(contract.error(2 * truth, truth), 1.0)
    assert contract.error(truth[:, :0], truth[:, :0]) == 0.0
    assert contract.error(truth[..., :0], truth[..., :0]) == 0.0


def test_what_is_not_a_number_is_no_small_error():
    assert math.isnan(contract.error(torch.tensor([math.nan, 1.0]), torch.ones(2)))
