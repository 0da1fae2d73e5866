"""Whatever a block of nobody's library does: an injected model computes what it computed before,
call by call, and is in the same state afterwards."""

import pytest
import torch

import kernelwright as kw
from inject.odd_blocks import ODDITIES, data, model
from inject.stand_in import CpuGraphs
from inject.trained import differing, gradients, twice
from kernelwright.inject.graphs import graphs as graphs_module
from kernelwright.inject.reuse.bound import Bound
from kernelwright.inject.training.blocks import Training

# forwards that are not written down, and why
NOT_RECORDED = {
    "counts": "the forward of Block sets calls",
    "appends": "the forward of Block sets seen",
    "sets_a_buffer": "the forward of Block sets total",
    "normalises_batches": "it writes to its inputs",
    "normalises_batches_by_a_function": "it writes to its buffers",
}


def state_of(made):
    own = [(block.calls, block.seen) for block in made.blocks]
    return own, {name: t.clone() for name, t in made.named_buffers()}


def after_seed(seed, run):
    torch.manual_seed(seed)
    return run()


def check_state(ours, eager):
    (own, buffers), (expected, held) = state_of(ours), state_of(eager)
    assert own == expected
    assert all(torch.equal(t, held[name]) for name, t in buffers.items())


@pytest.mark.parametrize("oddity", ODDITIES)
def test_results_and_gradients_are_eagers_at_every_call(oddity):
    eager, ours = twice(model(oddity))
    report = kw.inject(ours)
    for training in (False, True) if "batches" in oddity else (False,):
        eager.train(training), ours.train(training)
        with torch.no_grad():
            for call in range(4):
                assert torch.equal(
                    *(after_seed(call, lambda m=m: m(**data())) for m in (ours, eager))
                )
    check_state(ours, eager)
    for made in (eager, ours):
        made.to(torch.bfloat16).train()
    for step in range(3):
        found, expected = (
            after_seed(step, lambda m=m: gradients(m, data(torch.bfloat16))) for m in (ours, eager)
        )
        assert differing(found, expected) == []
    check_state(ours, eager)
    if oddity in NOT_RECORDED:
        assert any(NOT_RECORDED[oddity] in line for line in report.gradients), report.gradients
    if "no_buffer" in oddity:
        assert any("kernels, backward" in line for line in report.gradients), report.gradients
    assert not any("failed" in line for line in (*report.gradients, *map(str, report.problems)))


def test_a_result_of_other_strides_is_left_to_eager():
    """The model may go on with an op that sums it in another order."""
    eager, ours = twice(model("pools"))
    for made in (eager, ours):
        made.last = torch.nn.Identity()
    report = kw.inject(ours)
    with torch.inference_mode():
        expected = eager(**data())
        for _ in range(2):
            assert ours(**data()).stride() == expected.stride()
    assert any("other strides" in str(problem) for problem in report.problems)


def test_a_model_that_writes_to_its_buffers_has_no_graph(monkeypatch):
    """A capture runs the forward more often than eager would."""
    monkeypatch.setattr(graphs_module, "Graphs", CpuGraphs)
    eager, ours = twice(model("writes_to_a_buffer").eval())
    report = kw.inject(ours, graphs=True)
    with torch.no_grad():
        assert all(torch.equal(ours(**data()), eager(**data())) for _ in range(5))
    check_state(ours, eager)
    assert any("it writes to its buffers" in line for line in report.graph_lines)


def failing(*given, **how):
    raise KeyError("a fault of ours")


@pytest.mark.parametrize("where", ["between blocks", "a trial"])
def test_a_fault_of_ours_leaves_a_block_to_eager_and_is_reported(where, monkeypatch):
    eager, ours = twice(model("rotates"))
    report = kw.inject(ours)
    if where == "a trial":
        monkeypatch.setattr(Training, "_compared", failing)
        assert differing(gradients(ours, data()), gradients(eager, data())) == []
    else:
        monkeypatch.setattr(Bound, "_made", failing)
        with torch.no_grad():
            expected = eager(**data())
            assert all(torch.equal(ours(**data()), expected) for _ in range(4))
    assert "KeyError: 'a fault of ours'" in f"{report} {report.gradients}"
