"""Graphs of a forward: when it is run, captured and replayed, and what leads to a new capture."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

from kernelwright.inject.graphs import graphs as graphs_module
from kernelwright.inject.graphs.graphs import Graphs, capturing, keep

from .stand_in import (  # noqa: F401
    Again,
    CpuGraphs,
    alignment_of_new_memory,
    called,
    data,
    function,
    model,
)


def test_the_first_call_runs_the_second_is_captured_later_ones_are_replayed():
    module, graphs, seen = model(), CpuGraphs(), []
    for seed in range(5):
        x = data(seed)
        assert torch.equal(called(graphs, module, x, scale=2.0), module(x, scale=2.0))
        seen.append(graphs.counts)
    assert seen == [(0, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
    assert graphs.captured == 1
    assert graphs.reasons == {}


def test_a_result_is_not_changed_by_later_calls():
    module, graphs = model(), CpuGraphs()
    results = [called(graphs, module, data(seed)) for seed in range(4)]
    for seed, result in enumerate(results):
        assert torch.equal(result, module(data(seed)))


def test_a_hook_added_after_the_capture_counts():
    module, graphs = model(), CpuGraphs()
    for seed in range(3):
        called(graphs, module, data(seed))
    assert graphs.captured == 1
    module.proj.register_forward_hook(lambda module, args, out: out * 2)
    assert torch.equal(called(graphs, module, data()), module(data()))
    assert graphs.captured == 0


def test_torch_compile_traces_the_forward_itself():
    module, graphs = model(), CpuGraphs()
    compiled = torch.compile(
        lambda x: called(graphs, module, x), backend="eager", fullgraph=True, dynamic=False
    )
    for seed in range(3):
        assert torch.equal(compiled(data(seed)), module(data(seed)))
    assert graphs.counts == (0, 0)
    assert graphs.reasons == {}


def test_a_graph_inside_a_capture_runs_as_part_of_it():
    inner, outer = CpuGraphs(), CpuGraphs()
    module, around = model(), nn.Identity().eval()
    for seed in range(4):
        x = data(seed)
        got = outer(around, lambda self, x: called(inner, module, x) + 1, (x,), {})
        assert torch.equal(got, module(x) + 1)
    assert outer.captured == 1
    assert set(inner.reasons) == {"inside another capture"}


def test_a_change_of_the_model_leads_to_another_capture():
    module, graphs = model(), CpuGraphs()
    for seed in range(3):
        called(graphs, module, data(seed))
    module.proj = nn.Linear(8, 8).eval().requires_grad_(False)
    seen = []
    for seed in range(3):
        assert torch.equal(called(graphs, module, data(seed)), module(data(seed)))
        seen.append((graphs.captured, graphs.counts[0]))
    assert seen == [(0, 1), (1, 2), (1, 2)]
    assert graphs.reasons == {"the model has changed": 1}


GONE = {
    "data": lambda m: setattr(m.weight, "data", m.weight.data.clone()),
    "rebound": lambda m: setattr(m, "weight", nn.Parameter(torch.ones(8, 8), False)),
    "moved": lambda m: m.double(),
}


@pytest.mark.parametrize("change", GONE.values(), ids=GONE)
def test_no_graph_is_replayed_over_weights_whose_memory_is_gone(change):
    module, graphs = model(), CpuGraphs()
    for seed in range(3):
        called(graphs, module, data(seed))
    before = graphs.counts
    change(module.proj)
    x = data(3).to(module.proj.weight.dtype)
    assert torch.equal(called(graphs, module, x), module(x))
    assert graphs.counts == before


def test_memory_is_released_when_the_model_can_no_longer_be_captured():
    module, graphs = model(), CpuGraphs()
    for seed in range(3):
        called(graphs, module, data(seed))
    module.proj.weight.data = module.proj.weight.data.clone()
    called(graphs, module, data())
    assert graphs._recorder.released == 0
    module.proj.train()
    called(graphs, module, data())
    assert graphs._recorder.released == 1


def test_a_failed_capture_is_told_and_not_tried_again():
    tried = []

    def forward(x):
        if capturing():
            tried.append(1)
            raise RuntimeError("not while capturing\nand more about it")
        return x + 1

    graphs, call = function(forward)
    call(data())
    with pytest.warns(UserWarning, match="without a CUDA graph: capture failed: not while"):
        call(data())
    for seed in range(2):
        assert torch.equal(call(data(seed)), data(seed) + 1)
    assert tried == [1]
    assert not capturing()
    assert graphs.reasons == {"capture failed: not while capturing": 3}
    assert torch.equal(call(data(0, 3)), data(0, 3) + 1)


def test_an_error_of_the_forward_reaches_the_caller():
    def forward(x):
        raise KeyError("mine")

    _, call = function(forward)
    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            call(data())


def test_what_a_cache_hands_out_in_a_capture_lives_as_long_as_the_graph():
    class Table:
        pass

    made = []

    def forward(x):
        table = keep(Table())
        made.append((capturing(), weakref.ref(table)))
        return x + 1

    graphs, call = function(forward)
    for seed in range(3):
        call(data(seed))
    alive = [inside for inside, table in made if table() is not None]
    assert alive == [True]
    graphs.clear()
    assert all(table() is None for _, table in made)
    assert graphs.captured == 0


def test_the_least_recently_used_graph_is_dropped():
    module, graphs = model(), CpuGraphs(limit=2)
    one, two, three = (data(0, n, 8) for n in (1, 2, 3))
    for x in (one, one, two, two, one, three, three):
        assert torch.equal(called(graphs, module, x), module(x))
    assert graphs.captured == 2
    recorded, _ = graphs.counts
    called(graphs, module, one)
    called(graphs, module, three)
    assert graphs.counts[0] == recorded
    called(graphs, module, two)
    called(graphs, module, two)
    assert graphs.counts[0] == recorded + 1


def test_inputs_that_never_come_again_soon_are_not_captured():
    module, graphs = model(), CpuGraphs(limit=2)
    for _ in range(3):
        for step in range(5):
            called(graphs, module, data(), scale=float(step))
    assert graphs.counts == (0, 0)
    assert graphs.reasons == {"inputs that did not recur soon": 13}


def test_a_thread_captures_only_what_it_has_run_before():
    module, graphs = model(), CpuGraphs()

    def elsewhere():
        thread = threading.Thread(target=called, args=(graphs, module, data()))
        thread.start()
        thread.join()

    called(graphs, module, data())
    elsewhere()
    assert graphs.counts == (0, 0)
    called(graphs, module, data())
    assert graphs.counts == (1, 1)
    elsewhere()
    assert graphs.counts == (1, 2)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))]
)
def test_a_copy_starts_empty(copied):
    module, graphs = model(), CpuGraphs(limit=3)
    for seed in range(2):
        called(graphs, module, data(seed))
    other = copied(graphs)
    assert type(other) is CpuGraphs
    assert (other.limit, other.captured, other.reasons) == (3, 0, {})
    assert graphs.captured == 1


def test_a_copied_model_has_graphs_of_its_own():
    module, graphs = model(), CpuGraphs()
    other = copy.deepcopy(module)
    other.proj.weight.zero_()
    for seed in range(4):
        for each in (module, other):
            assert torch.equal(called(graphs, each, data(seed)), each(data(seed)))
    assert graphs.counts[0] == graphs.captured == 2


def test_a_forward_that_goes_another_way_while_captured_gets_no_graph():
    graphs = CpuGraphs()

    class Shy(nn.Module):
        def forward(self, x):
            return x * 3 if Again.replaying else x * 2

    module = Shy().eval()
    for seed in range(3):
        assert torch.equal(called(graphs, module, data(seed)), data(seed) * 2)
    assert graphs.captured == 0
    assert list(graphs.reasons) == ["its graph gives other bits than the plain forward"]


def test_a_model_is_not_kept_alive(monkeypatch):
    monkeypatch.setattr(graphs_module, "equal", lambda a, b: True)

    class Forgets(Again):
        def record(self, run, device):
            return lambda: None, run()

    class ForgettingGraphs(Graphs):
        recorder = Forgets

    module, graphs = model(), ForgettingGraphs()
    module.forward = module.forward
    for seed in range(3):
        called(graphs, module, data(seed))
    assert graphs.captured == 1
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    assert graphs.captured == 0


def test_a_line_for_the_report():
    module, graphs = model(), CpuGraphs()
    assert graphs.describe() == "0 graphs"
    called(graphs, module.train(), data())
    assert graphs.describe() == "0 graphs; 1 call ran without one: training mode"
    called(graphs, module, data())
    graphs(module, lambda self, number: number, (1,), {})
    assert graphs.describe() == (
        "0 graphs; 3 calls ran without one: training mode (2), no tensor among the inputs (1)"
    )
    module.eval()
    for seed in range(2):
        called(graphs, module, data(seed))
    assert graphs.describe().startswith("1 graph; 3 calls")


def test_a_limit_below_one_is_an_error():
    with pytest.raises(ValueError, match="limit is 0"):
        Graphs(limit=0)
