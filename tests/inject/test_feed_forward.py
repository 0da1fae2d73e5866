"""GELU between two Linear layers: fused unless hooked, and eager's bits either way."""

import pytest
import torch
from diffusers.models.attention import FeedForward

import kernelwright as kw
from inject.harness import check_exact, check_fused, fused_sites, run, same
from kernelwright.inject.fusions import compiled_ops
from kernelwright.inject.fusions import feed_forward as fusions
from kernelwright.inject.runtime import sites


def layers(form="gelu-approximate", dtype=torch.float32):
    torch.manual_seed(0)
    model = FeedForward(32, activation_fn=form).to(dtype).eval()
    return model, {"hidden_states": torch.randn(2, 5, 32).to(dtype)}


@pytest.fixture
def wrong(monkeypatch):
    """A GELU with a small error, wherever it writes."""
    op = fusions.GELU
    for module in (fusions, compiled_ops):
        monkeypatch.setattr(module, "GELU", lambda *args, **how: op(*args, **how).mul_(1.01))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["gelu", "gelu-approximate"])
def test_exact_gives_the_bits_of_eager(form, dtype):
    assert fused_sites(check_exact(*layers(form, dtype))) == {"GELU": 1}


@pytest.mark.parametrize("form", ["gelu", "gelu-approximate"])
def test_fused_errs_no_more_than_eager(form):
    assert fused_sites(check_fused(*layers(form, torch.bfloat16))) == {"linear + GELU": 1}


@pytest.mark.parametrize("numerics", ["exact", "fused"])
def test_a_hook_sees_the_rows_before_they_are_activated(numerics):
    model, inputs = layers()
    seen = []
    model.net[0].proj.register_forward_hook(lambda module, args, out: seen.append(out))
    expected = run(model, inputs)
    before = seen.pop().clone()
    with kw.injected(model, numerics=numerics) as report:
        for _ in range(2):
            torch.testing.assert_close(run(model, inputs), expected)
    assert seen
    assert all(torch.equal(rows, before) for rows in seen), "overwritten"
    assert fused_sites(report) == {"GELU": 1}


def test_a_hook_on_the_activation_keeps_it_being_called():
    model, inputs = layers()
    calls = []
    model.net[0].register_forward_hook(lambda *_: calls.append(1))
    expected = run(model, inputs)
    with kw.injected(model) as report:
        assert same(run(model, inputs), expected)
        before = len(calls)
        assert same(run(model, inputs), expected)
    assert len(calls) == before + 1
    assert "fused" not in report.sites["GELU"]


def test_a_gelu_that_differs_stays_eager(wrong):
    model, inputs = layers()
    expected = run(model, inputs)
    with kw.injected(model) as report, pytest.warns(UserWarning, match="GELU differs"):
        assert all(same(run(model, inputs), expected) for _ in range(2))
    assert "fused" not in report.sites["GELU"]


def test_gradients_are_those_of_eager():
    model, inputs = layers(dtype=torch.bfloat16)
    inputs["hidden_states"].requires_grad_()

    def gradient():
        (got,) = torch.autograd.grad(model(**inputs).float().sum(), inputs["hidden_states"])
        return got

    expected = gradient()
    with kw.injected(model):
        assert all(torch.equal(gradient(), expected) for _ in range(2))


class Joined(torch.nn.Module):
    """The end of FLUX's single block: a GEMM of attention output concatenated with activations."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.proj_mlp = torch.nn.Linear(32, 64, dtype=dtype)
        self.act_mlp = torch.nn.GELU(approximate="tanh")
        self.proj_out = torch.nn.Linear(96, 32, dtype=dtype)

    def eager(self, left, x):
        wide = self.act_mlp(self.proj_mlp(x))
        return self.proj_out(torch.cat([left, wide], dim=-1))

    def fused(self, left, x, numerics="exact"):
        places = fusions.FeedForwardFusions(numerics, None, {})
        return places.joined_linear(self.proj_out, left, self.proj_mlp, self.act_mlp, x)


class Cats(torch.overrides.TorchFunctionMode):
    """Counts the calls of torch.cat."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.cat
        return function(*args, **(kwargs or {}))


def rows(dtype=torch.float32):
    return [torch.randn(2, 5, 32).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_joined_rows_are_written_in_place_of_a_concatenation(dtype):
    model, (left, x) = Joined(dtype), rows(dtype)
    with torch.no_grad():
        expected = model.eager(left, x)
        with Cats() as cats:
            assert torch.equal(model.fused(left, x), expected)
    assert cats.count == 0


def test_where_rounding_may_change_the_last_product_is_the_sum_of_two():
    model, (left, x) = Joined(), rows()
    notes = sites.Counter()
    with torch.no_grad(), sites.set_mode(notes=notes), Cats() as cats:
        got = model.fused(left, x, "fused")
    torch.testing.assert_close(got, model.eager(left, x))
    assert cats.count == 0
    assert notes["linear + GELU, last product in two", "fused"] == 1


@pytest.mark.parametrize("adapted", ["proj_mlp", "proj_out"])
def test_an_adapter_or_a_hook_keeps_the_last_product_whole(adapted):
    model, (left, x) = Joined(), rows()
    seen = []
    model.get_submodule(adapted).register_forward_hook(lambda *call: seen.append(call))
    with torch.no_grad():
        torch.testing.assert_close(model.fused(left, x, "fused"), model.eager(left, x))
    assert len(seen) == 2


def test_autocast_keeps_the_last_product_whole():
    model, (left, x) = Joined(), rows()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model.fused(left, x, "fused"), model.eager(left, x))


@pytest.mark.parametrize(("width", "begin"), [(32, 0), (32, 8), (32, 1), (30, 0), (1, 0)])
def test_rows_are_copied_into_wider_ones(width, begin):
    x = torch.randn(3, 4, begin + width).bfloat16()[..., begin:]
    wide = torch.full((3, 4, width + 16), 7.0, dtype=torch.bfloat16)
    compiled_ops.copy_rows(wide[..., :width], x)
    assert torch.equal(wide[..., :width], x)
    assert (wide[..., width:] == 7).all()


def test_rows_of_another_dtype_are_joined_as_eager_does():
    model, (left, x) = Joined(), rows()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.proj_mlp(x).dtype != left.dtype
        assert torch.equal(model.fused(left, x), model.eager(left, x))


def test_joined_rows_have_gradients():
    model, (left, x) = Joined(), rows()
    left.requires_grad_()

    def gradient(forward):
        (got,) = torch.autograd.grad(forward(left, x).sum(), left)
        return got

    assert torch.equal(gradient(model.fused), gradient(model.eager))


def test_joined_rows_that_differ_stay_eager(wrong):
    model, (left, x) = Joined(), rows()
    with torch.no_grad(), sites.set_mode(comparing=True, notes=sites.Counter(), off={}):
        assert torch.equal(model.fused(left, x), model.eager(left, x))
        assert sites.mode.off == {"GELU into joined rows": sites.DIFFERS}
