"""Graphs of blocks while gradients are recorded: eager's bits at every step, whatever is done with
gradients, weights and forwards in between; and a reason where a call runs without its graph.
"""

import copy
import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from training_presets import preset

import kernelwright as kw
from inject import training_scenarios as scenarios
from inject.trained import data, differing, drawn, gradients, model, steps, twice, with_lora
from inject.training_graphs import (  # noqa: F401
    Overwriting,
    UnkindGraphs,
    alignment_of_new_memory,
    counts,
    graphs_without_a_gpu,
    injected_pair,
    recordings,
    replayed,
)
from inject.training_scenarios import grads, loss_of, same, same_gradients
from kernelwright import models
from kernelwright.inject.training import block_programs, blocks
from kernelwright.inject.training import graphs as training_graphs
from kernelwright.inject.training.block_graph import OTHER_BITS


@pytest.mark.compatibility("training with graphs")
def test_every_step_has_eagers_bits():
    eager, ours = twice(model())
    report = kw.inject(ours, graphs=True)
    assert report.graph_lines == ["0 graphs"]
    for seed in range(4):
        same(eager, ours, data(seed))
    graphs = report.graphs[0].of_blocks
    assert graphs.captured == 2
    assert graphs.reasons == {}
    line = "while gradients are recorded: graphs of forward and backward for 2 blocks"
    assert report.graph_lines == ["0 graphs", line]
    assert line in str(report)
    assert replayed(graphs, lambda: same(eager, ours, data(9))) == (2, 2)


@pytest.mark.compatibility("training with graphs")
def test_steps_of_adapters_end_in_the_same_weights():
    eager, ours = twice(with_lora(model(), "q", "k", "v", "o"))
    inputs = {n: t.detach() for n, t in data().items()}
    graphs = kw.inject(ours, graphs=True).graphs[0].of_blocks
    assert torch.equal(steps(ours, inputs, 6), steps(eager, inputs, 6))
    assert differing(ours.state_dict(), eager.state_dict()) == []
    assert graphs.replays == 10
    assert graphs.reasons == {}


def test_the_first_call_runs_as_programs_and_the_next_is_captured():
    eager, ours, graphs = injected_pair(model(layers=1), calls=0)
    inputs = {n: t.detach() for n, t in data().items()}
    for m in (eager, ours):
        m.last = nn.Identity()
    seen = []
    for _ in range(4):
        same(eager, ours, inputs)
        seen.append(counts(graphs))
    # a capture is replayed once to be compared, and once for its caller
    assert seen[0] == [(0, 0), (0, 0)]
    assert seen[1] == [(1, 2), (1, 2)]
    assert seen[3] == [(1, 4), (1, 4)]


def test_nothing_is_captured_before_a_backward_has_run():
    ours = model()
    graphs = kw.inject(ours, graphs=True).graphs[0].of_blocks
    for _ in range(4):
        ours(**data())
    assert counts(graphs)[0][0] == 0


def test_gradients_and_results_are_not_changed_by_later_steps():
    eager, ours, graphs = injected_pair(model())
    scenarios.later_steps_change_nothing(eager, ours, data)
    assert graphs.captured == 2


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_accumulated(to_none):
    eager, ours, graphs = injected_pair(model())
    run = partial(scenarios.gradients_accumulate, eager, ours, data, to_none)
    assert replayed(graphs, run) == (12, 12)


@pytest.mark.parametrize("order", scenarios.ORDERS)
def test_two_forwards_before_their_backwards(order):
    eager, ours, graphs = injected_pair(model())
    scenarios.two_forwards_come_before_their_backwards(eager, ours, data, order)
    assert graphs.reasons == {training_graphs.WAITS: 4}
    assert replayed(graphs, lambda: same(eager, ours, data())) == (2, 2)


def test_a_forward_without_a_backward_frees_its_graph_when_it_is_dropped():
    eager, ours, graphs = injected_pair(model())
    loss = loss_of(ours, data())
    assert replayed(graphs, lambda: same(eager, ours, data())) == (0, 0)
    del loss
    assert replayed(graphs, lambda: same(eager, ours, data())) == (2, 2)


def test_a_graph_that_is_retained_is_not_overwritten():
    eager, ours, graphs = injected_pair(model())
    scenarios.a_graph_is_retained(eager, ours, data)
    assert graphs.reasons == {training_graphs.WAITS: 2}
    assert replayed(graphs, lambda: same(eager, ours, data())) == (2, 2)


def test_a_second_backward_without_retaining_raises_as_in_eager():
    _, ours, _ = injected_pair(model())
    loss = loss_of(ours, data())
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_the_first_block_is_done_before_the_second():
    eager, ours, graphs = injected_pair(model())
    scenarios.the_first_block_is_done_before_the_second(eager, ours, data)
    assert graphs.reasons == {training_graphs.WAITS: 2}


def test_weights_at_other_addresses_lead_to_another_capture():
    eager, ours, graphs = injected_pair(model())
    weight = ours.blocks[1].up.weight
    weight.data = weight.data.clone()
    assert replayed(graphs, lambda: same(eager, ours, data())) == (1, 1)
    assert graphs.reasons == {training_graphs.MOVED: 1}
    same(eager, ours, data(1))
    assert replayed(graphs, lambda: same(eager, ours, data(2))) == (2, 2)


def test_weights_that_are_moved_at_every_step_get_no_graph_in_the_end():
    eager, ours, graphs = injected_pair(model(layers=1))
    weight = ours.blocks[0].up.weight
    memory = [weight.data.clone() for _ in range(2)]
    for step in range(9):
        weight.data = memory[step % 2]
        same(eager, ours, data(step))
    assert graphs.captured == 0
    assert f"{training_graphs.MOVED}, at every capture" in graphs.reasons
    assert counts(graphs)[0][0] == training_graphs.MAX_CAPTURES


def test_weights_that_are_moved_before_the_backward():
    eager, ours, graphs = injected_pair(model())
    scenarios.weights_are_moved_before_the_backward(eager, ours, data)
    assert "weights were moved between forward and backward" in graphs.reasons


def test_a_weight_written_to_before_the_backward_raises_as_in_eager():
    _, ours, _ = injected_pair(model())
    loss = loss_of(ours, data())
    with torch.no_grad():
        ours.blocks[1].down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_switch_changed_before_the_backward_is_followed():
    eager, ours, graphs = injected_pair(model())
    before = torch.are_deterministic_algorithms_enabled()

    def run(m):
        loss = loss_of(m, data())
        torch.use_deterministic_algorithms(not before)
        try:
            loss.backward()
        finally:
            torch.use_deterministic_algorithms(before)

    same_gradients(eager, ours, run)
    assert any("switch of PyTorch" in reason for reason in graphs.reasons)


def changes():
    yield "frozen", lambda m: m.blocks[1].up.requires_grad_(False)
    yield "part", lambda m: setattr(m.blocks[0], "up", nn.Linear(32, 64))
    yield "hook", lambda m: m.blocks[1].up.register_forward_hook(lambda *given: given[-1] * 2)
    yield "outer", lambda m: m.blocks[1].register_full_backward_hook(lambda *given: None)


@pytest.mark.parametrize("change", [c for _, c in changes()], ids=[n for n, _ in changes()])
def test_what_is_changed_between_steps_is_followed(change):
    eager, ours, _ = injected_pair(model())
    for m in (eager, ours):
        torch.manual_seed(3)
        change(m)
    for seed in range(2):
        same(eager, ours, data(seed))


def test_hooks_on_tensors_and_parameters_run():
    eager, ours, graphs = injected_pair(model())
    found = []
    for m in (eager, ours):
        seen = []

        def watch(module, given, result, seen=seen):
            result[0].register_hook(lambda g: (seen.append(g.clone()), g * 2)[1])

        handles = [
            m.blocks[0].register_forward_hook(watch),
            m.blocks[1].up.weight.register_hook(lambda g: g * 3),
            m.blocks[0].up.weight.register_post_accumulate_grad_hook(
                lambda p, seen=seen: seen.append(p.grad.clone())
            ),
        ]
        for seed in range(2):
            m.zero_grad(set_to_none=True)
            loss_of(m, data(seed)).backward()
        found.append({**grads(m), **{str(i): t for i, t in enumerate(seen)}})
        for handle in handles:
            handle.remove()
    assert differing(*found) == []
    assert graphs.captured == 2


def descend(p):
    p.data.add_(p.grad, alpha=-0.1)
    p.grad = None


def test_an_optimizer_that_runs_in_the_backward():
    eager, ours, graphs = injected_pair(model())
    for m in (eager, ours):
        for p in m.parameters():
            p.register_post_accumulate_grad_hook(descend)
        for seed in range(3):
            loss_of(m, data(seed)).backward()
    assert differing(ours.state_dict(), eager.state_dict()) == []
    assert graphs.reasons == {}


def test_inference_between_forward_and_backward():
    eager, ours, graphs = injected_pair(model())
    scenarios.inference_comes_between(eager, ours, data, times=2)
    assert graphs.captured == 2


def test_autocast_is_told():
    eager, ours, graphs = injected_pair(model())
    with torch.autocast("cpu", torch.bfloat16):
        same(eager, ours, data())
    assert any("autocast" in reason for reason in graphs.reasons)
    same(eager, ours, data())


def test_a_scaled_loss_and_clipped_gradients():
    eager, ours, graphs = injected_pair(model())
    scenarios.a_loss_is_scaled_and_gradients_are_clipped(eager, ours, data, "cpu")
    assert graphs.captured == 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle_leaves_nothing_behind(where):
    eager, ours, graphs = injected_pair(model())
    scenarios.an_exception_is_raised(eager, ours, data, where)
    assert replayed(graphs, lambda: same(eager, ours, data())) == (2, 2)


def test_restore_between_forward_and_backward():
    eager, ours, _ = injected_pair(model())
    scenarios.it_is_restored_before_the_backward(eager, ours, data)


def test_restore_frees_the_memory_of_graphs():
    _, ours, graphs = injected_pair(model())
    memory = [weakref.ref(found.graph) for found in graphs._owners.values()]
    assert len(memory) == 2
    kw.restore(ours)
    del graphs
    gc.collect()
    assert [found() for found in memory] == [None, None]


def test_a_model_is_not_kept_alive():
    eager, ours, graphs = injected_pair(model())
    gone = weakref.ref(ours.blocks[0])
    for recorder in graphs.recorders:  # the stand-in runs the programs of its captures again
        recorder.results.clear()
    del eager, ours
    for _ in range(2):  # the blocks of a model are let go once the model is
        gc.collect()
    assert gone() is None
    assert graphs.captured == 0


def longer(seed):
    return {**data(seed), "x": drawn(2, 20, 8, seed=seed)}


def test_shapes_take_turns(monkeypatch):
    monkeypatch.setattr(training_graphs, "PATIENCE", 3)
    monkeypatch.setattr(blocks, "WAITS", 0)
    eager, ours, graphs = injected_pair(model(layers=1))
    for seed in range(3):
        same(eager, ours, longer(seed))
        assert replayed(graphs, lambda seed=seed: same(eager, ours, data(seed))) == (1, 1)
    assert training_graphs.ANOTHER in graphs.reasons
    for seed in range(4):
        same(eager, ours, longer(seed))
    assert replayed(graphs, lambda: same(eager, ours, longer(0))) == (1, 1)
    assert graphs.captured == 1


def test_dropout_is_told():
    eager, ours = twice(model(dropout=0.5).train())
    report = kw.inject(ours, graphs=True)
    for seed in range(3):
        torch.manual_seed(seed)
        expected = gradients(eager, data())
        torch.manual_seed(seed)
        assert differing(gradients(ours, data()), expected) == []
    assert "random numbers" in report.graph_lines[-1]


def test_other_processes_are_told(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    _, _, graphs = injected_pair(model(layers=1), calls=3)
    assert graphs.captured == 0
    assert "DDP" in graphs.describe()


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_graph_that_gives_other_bits_is_not_used(monkeypatch, half):
    class Wrong(Overwriting):
        def record(self, run, device):
            replay, result = super().record(run, device)
            own = result[0] if isinstance(result, tuple) else result

            def wrong():
                replay()
                if isinstance(result, tuple) == (half == "forward"):
                    own[0].mul_(1.01)

            return wrong, result

    monkeypatch.setattr(UnkindGraphs, "recorder", Wrong)
    _, _, graphs = injected_pair(model(layers=1))
    assert set(graphs.reasons) == {OTHER_BITS}


def test_attention_that_does_not_repeat_itself_is_captured_too(monkeypatch):
    """Unless deterministic algorithms are asked for, what comes after its backward may differ."""

    class Varying(Overwriting):
        def record(self, run, device):
            replay, result = super().record(run, device)

            def varying():
                replay()
                if not isinstance(result, tuple):  # the last is made of all that attention is given
                    result[-1].mul_(1.01)

            return varying, result

    monkeypatch.setattr(UnkindGraphs, "recorder", Varying)
    monkeypatch.setattr(block_programs, "ON_A_CPU", "none")
    before = torch.are_deterministic_algorithms_enabled()
    for deterministic in (True, False):
        torch.use_deterministic_algorithms(deterministic)
        try:
            ours = model(layers=1)
            graphs = kw.inject(ours, graphs=True).graphs[0].of_blocks
            for seed in range(3):
                gradients(ours, data(seed))
        finally:
            torch.use_deterministic_algorithms(before)
        assert graphs.captured == (0 if deterministic else 1), graphs.reasons


def test_a_failed_capture_is_told_and_not_tried_again(monkeypatch):
    def record(self, run, device):
        raise RuntimeError("not while capturing\nand more about it")

    monkeypatch.setattr(Overwriting, "record", record)
    with pytest.warns(UserWarning, match="graphs while training: capture failed: not while"):
        _, _, graphs = injected_pair(model(layers=1), calls=5)
    assert set(graphs.reasons) == {"capture failed: not while capturing"}


def test_blocks_that_were_captured_in_another_order():
    """The first block gets a new graph, so its values may lie where the second one's graph writes:
    that one gets a new one too."""
    eager, ours, graphs = injected_pair(model(layers=3))
    scenarios.a_weight_is_moved(eager, ours, data)
    assert graphs.reasons == {training_graphs.MOVED: 1}
    assert replayed(graphs, lambda: same(eager, ours, data())) == (3, 3)


def test_kinds_of_blocks_that_get_their_graphs_at_different_steps():
    """The last block of each kind of FLUX is given gradients of another layout at first, and has
    its graph a step after blocks that come later."""
    eager, ours = twice(preset("flux-dev", False, torch.float32))
    inputs = models.inputs("flux-dev", tiny=True, dtype=torch.float32)
    graphs = kw.inject(ours, graphs=True).graphs[0].of_blocks
    assert torch.equal(steps(ours, inputs, 4), steps(eager, inputs, 4))
    assert differing(ours.state_dict(), eager.state_dict()) == []
    assert (graphs.captured, graphs.reasons) == (4, {})
    assert replayed(graphs, lambda: gradients(ours, inputs)) == (4, 4)


class Turning(nn.Module):
    """Gives its blocks the same time, or each another one."""

    def __init__(self, inner):
        super().__init__()
        self.blocks, self.apart = inner.blocks, False

    def forward(self, x, text, time):
        for block in self.blocks:
            x, text = block(x, text, time)
            time = time * 2 if self.apart else time
        return x


def wide(seed):
    return {**data(seed), "x": drawn(2, 12, 32, seed=seed)}


def test_an_input_of_several_blocks_is_copied_once(monkeypatch):
    eager, ours = twice(Turning(model(layers=3)))
    graphs = kw.inject(ours, graphs=True).graphs[0].of_blocks
    for seed in range(4):
        same(eager, ours, wide(seed))
    assert graphs.captured == 3
    # x and text of each block, and the time of all
    assert len({id(b) for o in graphs._owners.values() for b in o.graph.buffers}) == 7
    for m in (eager, ours):
        m.apart = True
    for seed in range(4):
        same(eager, ours, wide(seed))
    assert replayed(graphs, lambda: same(eager, ours, wide(5))) == (3, 3)


def test_an_input_written_to_unnoticed_between_two_steps_is_copied_again():
    eager, ours, graphs = injected_pair(model(), calls=0)
    inputs = {n: t.detach() for n, t in data().items()}
    for seed in range(5):
        inputs["text"].data.copy_(drawn(2, 5, 32, seed=seed))
        same(eager, ours, inputs)
    assert (graphs.captured, graphs.reasons) == (2, {})


def test_a_copied_model_has_graphs_of_its_own():
    eager, ours, graphs = injected_pair(model())
    others = [copy.deepcopy(m) for m in (eager, ours)]
    for m in others:
        with torch.no_grad():
            m.blocks[0].up.weight.mul_(2)
    for seed in range(3):
        same(*others, data(seed))
        same(eager, ours, data(seed))
    assert graphs.captured == 4


def test_threads_train_one_model():
    eager, ours, _ = injected_pair(model())
    weights = {m: list(m.blocks.parameters()) for m in (eager, ours)}

    def found(m, seed):
        return torch.autograd.grad(loss_of(m, data(seed)), weights[m], allow_unused=True)

    expected = {seed: found(eager, seed) for seed in range(4)}
    wrong = []

    def run(seed):
        for _ in range(3):
            pairs = zip(found(ours, seed), expected[seed], strict=True)
            wrong.extend(seed for a, b in pairs if b is not None and not torch.equal(a, b))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
