"""The error bound of the tiers that round differently."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

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


def test_rows_are_those_of_every_result():
    assert accuracy.rows(torch.ones(2, 3, 4)) == 6
    assert accuracy.rows((torch.ones(5, 4), [torch.ones(7)], torch.ones(3, dtype=torch.long))) == 6
    assert accuracy.rows(torch.tensor(1.0)) == 1
    assert accuracy.rows(torch.ones(2, 0)) == 1


def test_nothing_but_zeros_has_an_error_of_its_own_size():
    assert accuracy.error(torch.full((4,), 3.0), torch.zeros(4)) == 6.0
    assert accuracy.error((), ()) == 0.0


class Doubling(nn.Module):
    """Notes how many samples it is given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))
        self.seen = []

    def forward(self, x, scale):
        self.seen.append(len(x))
        return x * self.weight * scale


def measured(module, x, scale=1.5):
    with torch.no_grad():
        expected = module(x, scale)
        module.seen.clear()
        return accuracy.errors(
            module, type(module).forward, (x,), {"scale": scale}, expected, expected, nullcontext
        )


def test_a_large_batch_is_run_a_few_samples_at_a_time(monkeypatch):
    x = torch.randn(6, 8, dtype=torch.bfloat16)
    whole, module = measured(Doubling(), x), Doubling()
    monkeypatch.setattr(accuracy, "SAMPLES", 16)  # two samples
    found = measured(module, x)
    assert set(module.seen) == {2}
    assert math.isclose(found["error"], whole["error"], rel_tol=1e-6)
    assert found["error"] == found["eager_error"]


def test_a_batch_that_fits_is_run_whole(monkeypatch):
    monkeypatch.setattr(accuracy, "SAMPLES", 48)
    module = Doubling()
    measured(module, torch.randn(6, 8, dtype=torch.bfloat16))
    assert not module.seen  # eager is not run again on a part of it


def test_without_weights_to_widen_nothing_is_measured():
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    hooked, meta = Doubling(), Doubling()
    hooked.register_forward_hook(lambda *args: None)
    assert accuracy.errors(hooked, Doubling.forward, (x,), {"scale": 1}, x, x, nullcontext) == {}
    meta.to("meta")
    assert accuracy.errors(meta, Doubling.forward, (x,), {"scale": 1}, x, x, nullcontext) == {}
