"""A shape after the first: its first call runs as without injection, and its second is compared."""

import pytest
import torch

import kernelwright as kw
from kernelwright import models
from kernelwright.fuser import recording

from .harness import run
from .tape import graphs_on_the_cpu
from .test_across_blocks import LAYERS, Model, latents

LENGTHS = (24, 17, 11, 30)


@pytest.fixture
def recorded(monkeypatch):
    """The inputs that blocks were recorded with."""
    sizes, record = [], recording.record

    def counted(module, args, kwargs, opaque=()):
        sizes.append(args[0].shape[1])
        return record(module, args, kwargs, opaque)

    monkeypatch.setattr(recording, "record", counted)
    return sizes


def runs(model, length, times=1):
    return [run(model, latents(length)) for _ in range(times)]


@pytest.mark.parametrize("numerics", ["exact", "fused"])
def test_a_shape_that_comes_once_is_neither_recorded_nor_compared(recorded, numerics):
    model = Model().eval()
    expected = [runs(model, length)[0] for length in LENGTHS]
    report = kw.inject(model, numerics=numerics)
    got = [runs(model, length)[0] for length in LENGTHS]
    assert recorded == [LENGTHS[0]]
    assert len({f.inputs for f in report.findings}) == 1
    assert all(map(torch.equal, got[1:], expected[1:]))
    assert f"{LAYERS} modules ran as they are at a further shape" in " ".join(str(report).split())


def test_a_shape_that_comes_again_is_compared_and_then_runs_as_programs(recorded):
    model = Model().eval()
    (expected,) = runs(model, LENGTHS[1])
    report = kw.inject(model)
    runs(model, LENGTHS[0])
    before = len(report.findings)
    runs(model, LENGTHS[1])
    assert len(report.findings) == before
    assert torch.equal(*runs(model, LENGTHS[1]), expected)
    assert recorded == [*LENGTHS[:2]]
    assert len(report.findings) == 2 * before
    assert all(f.equal for f in report.findings)
    assert "further shape" not in str(report)
    assert all(torch.equal(y, expected) for y in runs(model, LENGTHS[1], 3))


def test_another_state_at_a_known_shape_is_compared_at_once():
    model = Model().eval()
    report = kw.inject(model)
    runs(model, LENGTHS[0], 2)
    before = len(report.findings)
    with torch.autocast("cpu", torch.bfloat16):
        runs(model, LENGTHS[0])
    assert len(report.findings) > before
    assert "further shape" not in str(report)


def test_a_graph_of_a_further_shape_has_what_was_compared():
    """Captured at its second call, it would go on with the blocks as they were."""
    model = Model().eval()
    (expected,) = runs(model, LENGTHS[1])
    with graphs_on_the_cpu(), kw.injected(model, graphs=True) as report:
        runs(model, LENGTHS[0], 4)
        assert report.graphs[0].captured == 1
        for calls, captured in ((2, 1), (2, 2)):
            assert all(torch.equal(y, expected) for y in runs(model, LENGTHS[1], calls))
            assert report.graphs[0].captured == captured, report.graphs[0].describe()
        fused = {f.inputs for f in report.findings if f.equal}
        assert len(fused) == 2


def test_prompts_of_a_language_model_with_new_lengths_are_not_compared():
    model = models.build("llama-3-8b", tiny=True, device="cpu", dtype=torch.float32).eval()
    ids = [torch.randint(0, 50, (1, length)) for length in (12, 15, 9)]
    with torch.no_grad():
        expected = [model(input_ids=i, use_cache=False).logits for i in ids]
        report = kw.inject(model)
        got = [model(input_ids=ids[0], use_cache=False).logits]
        before = len(report.findings)
        got += [model(input_ids=i, use_cache=False).logits for i in ids[1:]]
        assert len(report.findings) == before > 0
        model(input_ids=ids[1], use_cache=False)
    assert all(map(torch.equal, got, expected))
    assert len(report.findings) > before
