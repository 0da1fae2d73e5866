"""Recorded blocks of a model on a GPU are compared without waiting for each; on a CPU, where there
is nothing to wait for, these tests pretend."""

import gc
from weakref import ref

import pytest
import torch

import kernelwright as kw
from inject.harness import run, same
from inject.tape import graphs_on_the_cpu
from inject.test_across_blocks import (
    ALL,
    LAYERS,
    RESULTS,
    Counted,
    Model,
    check_given_up,
    latents,
)
from kernelwright.inject.reuse.program_sites import ProgramSites
from kernelwright.inject.reuse.recorded import Recorded
from kernelwright.inject.runtime import comparisons, model_run
from kernelwright.inject.verify import comparison


@pytest.fixture(autouse=True)
def waits_for_a_gpu(monkeypatch):
    monkeypatch.setattr(comparisons, "can_wait", lambda: model_run.active.at_end is not None)


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


@pytest.fixture
def asked(monkeypatch):
    """When the host asked for the outcome of comparisons, as the number of comparisons so far."""

    def defer(found, own=comparisons.defer):
        pending.append(found)
        own(found)

    def conclude(found, own=comparisons._conclude):
        times.append(len(pending))
        own(found)

    pending, times = [], []
    monkeypatch.setattr(comparisons, "defer", defer)
    monkeypatch.setattr(comparisons, "_conclude", conclude)
    return times


def of_nothing(a, b):
    assert (a, b) == ([], [])
    return True


def test_the_host_asks_once_in_a_forward(asked, counted, monkeypatch):
    model, inputs = Model().eval(), latents()
    expected = run(model, inputs)
    report = kw.inject(model)
    with monkeypatch.context() as patched:
        patched.setattr(comparison, "equal", of_nothing)  # of tensors it would wait
        patched.setattr(comparisons, "equal", of_nothing)
        assert same(run(model, inputs), expected)
        assert asked == [LAYERS]
        assert same(run(model, inputs), expected)
        assert asked == [LAYERS, 2 * LAYERS]
    result, programs = counted(model, inputs)
    assert same(result, expected)
    assert programs == ALL
    assert [f.equal for f in report.findings] == [True] * LAYERS
    assert asked == [LAYERS, 2 * LAYERS]


def test_a_block_that_differs_is_compared_by_its_programs_at_the_next_call(counted, monkeypatch):
    model, inputs = Model().eval(), latents()
    expected, own = run(model, inputs), Recorded.outputs

    def wrong(self, *given, **how):
        outputs = own(self, *given, **how)
        outputs[0] = outputs[0] * 1.01
        return outputs

    report = kw.inject(model)
    with monkeypatch.context() as patched:
        patched.setattr(Recorded, "outputs", wrong)
        assert same(run(model, inputs), expected)
        assert not report.findings  # nobody has looked for what differs yet
        with pytest.warns(UserWarning, match="its forward differs from eager's"):
            assert same(run(model, inputs), expected)
        assert same(run(model, inputs), expected)
    assert len(report.problems) == LAYERS
    assert counted(model, inputs)[1] == 0


@RESULTS
def test_work_for_the_next_block_that_has_other_bits_is_given_up(which, counted, monkeypatch):
    check_given_up(which, counted, monkeypatch)


def test_values_that_prove_nothing_are_compared_again(counted):
    model, inputs = Model().eval(), latents()
    zeros = {**inputs, "x": torch.zeros_like(inputs["x"]), "condition": 0 * inputs["condition"]}
    expected = run(model, zeros), run(model, inputs)
    report = kw.inject(model)
    assert same(run(model, zeros), expected[0])
    assert "blocks.0" not in {f.module for f in report.findings}
    for _ in range(4):
        result, programs = counted(model, inputs)
    assert same(result, expected[1])
    assert programs == ALL


def test_a_nan_is_no_difference(counted):
    model, inputs = Model().eval(), latents()
    broken = {**inputs, "x": inputs["x"].clone()}
    broken["x"][0, 0, 0] = torch.nan
    expected = run(model, broken), run(model, inputs)
    report = kw.inject(model)
    for _ in range(3):
        assert torch.equal(run(model, broken).isnan(), expected[0].isnan())
    for _ in range(5):
        result, programs = counted(model, inputs)
    assert same(result, expected[1])
    assert programs == ALL
    assert not report.problems


def test_inputs_of_blocks_are_not_kept_until_the_end():
    model, inputs = Model().eval(), latents()
    seen, alive = [], []

    def look(model, x):
        gc.collect()
        alive.append(sum(t() is not None for t in seen))
        seen.append(ref(x))
        return x

    model.between = dict.fromkeys(range(LAYERS), look)
    kw.inject(model)
    with torch.no_grad():
        model(**inputs)
    assert max(alive) <= 1, alive


def test_another_size_is_compared_without_waiting(asked, counted):
    model, inputs, others = Model().eval(), latents(), latents(5)
    expected = run(model, others)
    kw.inject(model)
    for given in (inputs, inputs, others, others, others):
        result = run(model, given)
    assert same(result, expected)
    assert len(asked) == 4
    result, programs = counted(model, others)
    assert same(result, expected)
    assert programs == ALL


def test_what_differs_is_found_before_a_graph_is_captured(monkeypatch):
    """A graph would go on with the whole block as eager runs it, and nobody would say why."""

    def wrong(self, program, given, outputs, own=ProgramSites._kernel):
        own(self, program, given, outputs)
        if "program 2 of Block" in self.names[id(program)]:
            next(iter(outputs.values())).mul_(1.01)

    model, inputs = Model().eval(), latents()
    expected = run(model, inputs)
    monkeypatch.setattr(ProgramSites, "_kernel", wrong)
    with graphs_on_the_cpu():
        report = kw.inject(model, graphs=True)
        assert same(run(model, inputs), expected)
        with pytest.warns(UserWarning, match="program 2 of Block differs from eager's"):
            assert same(run(model, inputs), expected)
        for _ in range(3):
            assert same(run(model, inputs), expected)
    (graphs,) = report.graphs
    assert graphs.captured == 1
    assert "what differs from eager is looked for first" in graphs.describe()
    assert len(report.problems) == LAYERS
    assert {fate for (name, fate) in report.findings[-1].sites if name == "program 1 of Block"} == {
        "fused"
    }
