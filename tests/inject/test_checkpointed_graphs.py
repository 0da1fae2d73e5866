"""Graphs of blocks where autograd saves through hooks, such as those of gradient checkpointing: all
share their memory, and have eager's bits whatever the hooks do."""

import gc
from types import SimpleNamespace

import pytest
import torch

import kernelwright as kw
from inject.trained import data, differing, drawn, model, steps, twice, with_lora
from inject.training_graphs import (  # noqa: F401
    alignment_of_new_memory,
    counts,
    graphs_without_a_gpu,
    injected_pair,
    recordings,
)
from inject.training_scenarios import grads, loss_of, same
from kernelwright.inject.training import blocks
from kernelwright.inject.training import graphs as training_graphs
from kernelwright.inject.training.block_graph import BlockGraph


def replays_on_loan(graphs, run):
    """How many forwards and backwards a function replays in memory that is lent."""
    before = [r.replayed for r in graphs.on_loan]
    run()
    return tuple(r.replayed - b for r, b in zip(graphs.on_loan, before, strict=True))


@pytest.mark.compatibility("gradient checkpointing")
@pytest.mark.compatibility("training with graphs")
def test_checkpointing_replays_forwards_twice():
    trained = model(layers=3)
    trained.checkpointing = False  # not reentrant
    eager, ours, graphs = injected_pair(trained, calls=3)
    # one of the results of the last block has no gradient, which the second step knows
    assert graphs.captured == 3
    assert graphs.reasons == {}
    assert counts(graphs) == [(0, 0), (0, 0)]
    assert replays_on_loan(graphs, lambda: same(eager, ours, data(9))) == (6, 3)


def test_steps_of_checkpointed_adapters_end_in_the_same_weights():
    trained = with_lora(model(), "q", "k", "v", "o")
    trained.checkpointing = False
    eager, ours = twice(trained)
    inputs = {n: t.detach() for n, t in data().items()}
    graphs = kw.inject(ours, graphs=True).graphs[0].of_blocks
    assert torch.equal(steps(ours, inputs, 5), steps(eager, inputs, 5))
    assert differing(ours.state_dict(), eager.state_dict()) == []
    assert graphs.reasons == {}
    assert graphs.replays == 16  # two blocks, twice in each of four steps


def test_reentrant_checkpointing_runs_without_graphs_and_says_so():
    trained = model()
    trained.checkpointing = True
    _, _, graphs = injected_pair(trained, calls=3)
    assert set(graphs.reasons) == {training_graphs.RECOMPUTED}
    assert "reentrant checkpointing" in graphs.describe()
    assert graphs.captured == 0


def both_in_one(m, inputs):
    """A checkpoint around all blocks."""
    return torch.utils.checkpoint.checkpoint(lambda: m(**inputs), use_reentrant=False)


@pytest.mark.parametrize("around", [1, 2], ids=["around one block", "around both"])
def test_a_checkpoint_around_several_blocks(around):
    trained = model()
    trained.checkpointing = False if around == 1 else None
    eager, ours = twice(trained)
    graphs = kw.inject(ours, graphs=True).graphs[0].of_blocks
    for seed in range(5):
        for m in (eager, ours):
            m.zero_grad(set_to_none=True)
            out = both_in_one(m, data(seed)) if around == 2 else m(**data(seed))
            out.float().square().mean().backward()
        assert differing(grads(ours), grads(eager)) == []
    assert (training_graphs.LENT in graphs.reasons) == (around == 2)


def test_hooks_that_keep_what_autograd_saves():
    """The memory is lent as long as they do: no other block may write to it."""
    eager, ours = twice(model(layers=3))
    graphs = kw.inject(ours, graphs=True).graphs[0].of_blocks
    for seed in range(5):
        for m in (eager, ours):
            m.zero_grad(set_to_none=True)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                loss = loss_of(m, data(seed))
            loss.backward()
        assert differing(grads(ours), grads(eager)) == []
    assert graphs.reasons[training_graphs.LENT] > 0
    assert graphs.on_loan[1].replayed > 0


def test_hooks_that_copy_what_autograd_saves():
    eager, ours = twice(model())
    graphs = kw.inject(ours, graphs=True).graphs[0].of_blocks
    for seed in range(4):
        for m in (eager, ours):
            m.zero_grad(set_to_none=True)
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
                loss = loss_of(m, data(seed))
            loss.backward()
        assert differing(grads(ours), grads(eager)) == []
    assert graphs.reasons == {}
    assert graphs.on_loan[0].replayed > 0
    assert graphs.on_loan[1].replayed == 1  # when it was captured


def test_checkpointed_shapes_take_turns(monkeypatch):
    """Graphs, and the memory of their inputs, are not made for every shape that comes along."""
    monkeypatch.setattr(blocks, "WAITS", 0)
    trained = model(layers=1)
    trained.checkpointing = False
    eager, ours = twice(trained)
    graphs = kw.inject(ours, graphs=True).graphs[0].of_blocks

    def step(seed, length):
        given = {**data(seed), "x": drawn(2, length, 8, seed=seed)}
        given = {n: t.detach() for n, t in given.items()}  # the text has no gradient
        same(eager, ours, given)

    for seed in range(3):
        step(seed, 12)
    assert graphs.captured == 1
    buffers = len(graphs._inputs_on_loan)
    for seed in range(2 * training_graphs.PATIENCE):
        step(seed, 20)
    assert graphs.reasons == {training_graphs.ANOTHER: training_graphs.PATIENCE - 1}
    assert graphs.captured == 1
    gc.collect()
    assert len(graphs._inputs_on_loan) == buffers
    assert replays_on_loan(graphs, lambda: step(5, 20)) == (2, 1)


def test_a_checkpointed_step_that_ends_in_the_middle_leaves_nothing_behind():
    trained = model()
    trained.checkpointing = False
    eager, ours, graphs = injected_pair(trained)

    class Stop(Exception):
        pass

    def stop(gradient):
        raise Stop

    for where in ("forward", "backward"):
        hook = ours.blocks[0].register_full_backward_hook(lambda *given: stop(None))
        if where == "forward":
            hook.remove()
            hook = ours.blocks[1].register_forward_pre_hook(lambda *given: stop(None))
        with pytest.raises(Stop):
            loss_of(ours, data(5)).backward()
        hook.remove()
        same(eager, ours, data(6))
    assert replays_on_loan(graphs, lambda: same(eager, ours, data(7)))[1] > 0


def test_what_lies_in_memory_of_a_graph_is_handed_out_as_a_copy():
    kept, given, lent, own = (torch.arange(4.0) + i for i in range(4))
    place = lent.untyped_storage()
    graph = SimpleNamespace(
        kept=[kept], inputs=[given, torch.empty(0)], lendable=(place.data_ptr(), place.nbytes())
    )
    asked = [kept[1:], given, lent[2:], own, None]
    found = BlockGraph.apart(graph, asked)
    assert found[3] is own
    assert found[4] is None
    for copied, original in zip(found[:3], asked[:3], strict=True):
        assert torch.equal(copied, original)
        assert copied.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()
