"""On a nearly full GPU, the comparison with eager must not make a forward fail."""

import copy
import random
import warnings
import weakref
from collections import Counter

import pytest
import torch
from torch import nn

import kernelwright as kw
from inject.harness import run, same
from inject.tape import graphs_on_the_cpu
from kernelwright import models
from kernelwright.inject.recipes._recipe import Patch
from kernelwright.inject.runtime import sites
from kernelwright.inject.runtime.sites import set_mode, site
from kernelwright.inject.state import hooks
from kernelwright.inject.verify import accuracy
from kernelwright.inject.verify.first_sight import Checker
from kernelwright.ops.linear import algorithms
from kernelwright.ops.linear.choosing import Decision


class Left:
    """A number outside of the module's attributes: writing to those would make it stateful."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number):
        self.number = number


@pytest.fixture(autouse=True)
def as_code_of_a_library(monkeypatch):
    """Count this file as library code: unknown code is never run twice."""
    known = {__name__.partition(".")[0]}
    monkeypatch.setattr(hooks, "LIBRARIES", hooks.LIBRARIES | known)


class Full(nn.Module):
    """A module on a full GPU: after `good` runs of its own forward in `dtype`, the next `fails`
    runs fail."""

    def __init__(self, dtype, fails, kind=torch.OutOfMemoryError, good=0):
        super().__init__()
        self.good = Left(good)
        self.dtype, self.left, self.kind = dtype, Left(fails), kind
        self.half_made = []

    def __deepcopy__(self, memo):
        return self

    def forward(self, x):
        y = x + 1
        if x.dtype == self.dtype and self.good.number:
            self.good.number -= 1
        elif x.dtype == self.dtype and self.left.number:
            self.left.number -= 1
            self.half_made.append(weakref.ref(y))
            raise self.kind("no room\nat all")
        return y


def data():
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def fused(module, x):
    return x + 1 + 2**-6


def as_of_a_recipe(function):
    """Attach what a recipe declares with its forward."""
    function.own, function.known, function.patch = (
        Full.forward,
        True,
        Patch(lambda module: True, None, ""),
    )
    return function


def crowded(module, x):
    """The fused forward, which fits into memory only after eager's result is freed."""
    return fused(module, Full.forward(module, x) - 1)


def checked(module, numerics, fused=fused):
    """The result of a checked forward, its warnings and its finding."""
    checker = Checker(numerics, verify=False)
    x = data()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = checker.run(module, as_of_a_recipe(fused), Full.forward, (x,), {})
    return x, result, [str(w.message) for w in said], checker


@pytest.mark.parametrize("numerics", ["fused", "fp8"])
def test_without_memory_for_a_float32_run_the_model_runs_on(numerics):
    module = Full(torch.float32, 1)
    x, result, said, checker = checked(module, numerics)
    assert torch.equal(result, fused(module, x))
    assert said == [
        "kernelwright: a Full at [4, 64] bfloat16 was not compared with eager: "
        "not enough memory for a float32 run"
    ]
    (finding,) = checker.findings
    assert finding.unchecked == accuracy.NO_MEMORY
    assert finding.problem is finding.error is None
    assert [made() for made in module.half_made] == [None]
    # one module of each class is tried, not all of them
    other = Full(torch.float32, 1)
    checker.run(other, as_of_a_recipe(fused), Full.forward, (x,), {})
    assert other.left.number == 1


def test_what_does_not_run_in_float32_runs_on_and_says_so():
    module = Full(torch.float32, 9, RuntimeError)
    _, _, said, checker = checked(module, "fused")
    assert said[0].endswith("it does not run in float32 (RuntimeError: no room)")
    assert checker.findings[0].unchecked


def test_without_memory_for_both_forwards_exact_stays_eager():
    module = Full(torch.bfloat16, 1, good=1)
    x, result, said, checker = checked(module, "exact", crowded)
    assert torch.equal(result, x + 1)
    assert said == [
        f"kernelwright: a Full at [4, 64] bfloat16: {sites.NO_MEMORY}; that stays eager"
    ]
    assert checker.findings[0].problem == sites.NO_MEMORY
    assert torch.equal(checker.run(module, as_of_a_recipe(fused), Full.forward, (x,), {}), x + 1)
    assert [made() for made in module.half_made] == [None]


def test_without_memory_for_both_forwards_fused_goes_unchecked():
    module = Full(torch.bfloat16, 1, good=1)
    x, result, said, checker = checked(module, "fused", crowded)
    assert torch.equal(result, fused(module, x))
    assert said == [
        f"kernelwright: a Full at [4, 64] bfloat16 was not compared with eager: {sites.NO_MEMORY}"
    ]
    assert checker.findings[0].unchecked == sites.NO_MEMORY


def test_a_model_that_needs_too_much_by_itself_says_that():
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        checked(Full(torch.bfloat16, 9), "exact")


def test_a_site_that_cannot_be_compared_for_lack_of_memory_stays_eager():
    module, x, off = Full(torch.bfloat16, 1), data(), {}
    with set_mode(notes=Counter(), comparing=True, off=off):
        result = site("sum", lambda: Full.forward(module, x), lambda: fused(module, x))
    assert torch.equal(result, x + 1)
    assert off == {"sum": sites.NO_MEMORY}


def test_the_report_says_which_products_pytorch_kept_and_why(monkeypatch):
    model = models.build("llama-3-8b", tiny=True)
    why = Decision("6 x 32 to 16 in bfloat16", "there was no memory to try others")
    with kw.injected(model) as report:
        assert "another algorithm" not in str(report)
        assert report.to_dict()["products"] == []
        monkeypatch.setattr(algorithms, "_decisions", {((torch.device("cpu"),),): why})
        said = " ".join(str(report).split())
        assert "In this process 0 of 1 products by another algorithm than PyTorch's" in said
        assert "1 not: there was no memory to try others;" in said
        assert report.to_dict()["products"] == [str(why)]


def test_the_report_names_what_was_not_compared(monkeypatch):
    how = {"tiny": True, "dtype": torch.bfloat16}
    model, inputs = models.build("llama-3-8b", **how), models.inputs("llama-3-8b", **how)

    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(accuracy.Float32Run, "__call__", full)
    with (
        kw.injected(model, numerics="fused") as report,
        pytest.warns(UserWarning, match="not compared with eager"),
    ):
        run(model, inputs)
    assert f"not compared with eager: {accuracy.NO_MEMORY}" in " ".join(str(report).split())
    assert {entry["why"] for entry in report.to_dict()["unchecked"]} == {accuracy.NO_MEMORY}


# what asks for memory, on the way to a graph and in models
ALLOCATES = [(torch, name) for name in ("cat", "stack", "empty", "empty_like", "empty_strided")]
ALLOCATES += [
    (torch.Tensor, name)
    for name in ("clone", "contiguous", "new_empty", "to", "float", "__add__", "__mul__")
]


class Memory:
    """Runs out at the `last` of the calls that ask for it, before or after that one has run."""

    def __init__(self, monkeypatch, last):
        self.asked, self.last = 0, last
        for owner, name in ALLOCATES:
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function):
        def counted(*args, **kwargs):
            self._ask()
            result = function(*args, **kwargs)
            self._ask()
            return result

        return counted

    def _ask(self):
        self.asked += 1
        if self.asked == self.last:
            raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize("preset", ["ltx-video", "flux-dev"])
def test_memory_that_runs_out_anywhere_in_the_first_calls_leaves_nothing_stale(preset, monkeypatch):
    how = {"tiny": True, "dtype": torch.float32}
    own = models.build(preset, **how)
    given = [models.inputs(preset, seed=seed, **how) for seed in (0, 0, 0, 0, 1, 2)]
    expected = [run(own, inputs) for inputs in given]

    def runs_out_at(last):
        model = copy.deepcopy(own)
        with graphs_on_the_cpu(), monkeypatch.context() as patched, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kw.inject(model, graphs=True)
            memory = Memory(patched, last)
            for inputs, result in zip(given, expected, strict=True):
                try:
                    got = run(model, inputs)
                except torch.OutOfMemoryError:
                    continue
                assert same(got, result), f"memory ran out at {last}"
        return memory.asked

    total = runs_out_at(None)
    for last in random.Random(0).sample(range(1, total), 4):
        runs_out_at(last)
