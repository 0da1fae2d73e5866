"""Graphs of blocks while gradients are recorded, without a GPU.

The stand-in for the GPU's memory is unkind: a replay writes over all that a graph may overwrite.
"""

from functools import partial

import pytest

import kernelwright as kw
from inject.stand_in import Again, CpuGraphs, alignment_of_new_memory, tensors  # noqa: F401
from inject.trained import data, twice
from inject.training_scenarios import same
from kernelwright.inject import planning
from kernelwright.inject.graphs import graphs as graphs_module


class Overwriting(Again):
    """What a graph returns and does not keep may lie anywhere, and what a graph keeps may lie where
    one that was captured before has its scratch memory."""

    def __init__(self, partner=None):
        super().__init__(partner)
        self.results = []  # (returned, kept) of each capture

    def record(self, run, device):
        number = len(self.results)
        replay, result = super().record(run, device)
        before = memory(run())  # what is the same in two runs is not the graph's own
        returned, kept = result if isinstance(result, tuple) else (result, [])
        lost = [t for t in returned if not memory([t]) & (before | memory(kept))]
        self.results.append((lost, kept))

        def overwriting():
            for i, (lost, kept) in enumerate(self.results):
                for t in [*(lost if i != number else []), *(kept if i > number else [])]:
                    if t.is_floating_point():
                        t.fill_(float("nan"))
            replay()

        return overwriting, result


def memory(tree):
    return {t.untyped_storage().data_ptr() for t in tensors(tree)}


class UnkindGraphs(CpuGraphs):
    recorder = Overwriting


@pytest.fixture(scope="module")
def recordings():
    return {}


@pytest.fixture(autouse=True)
def graphs_without_a_gpu(monkeypatch, recordings):
    """And blocks of one structure recorded once for all tests, which takes most of their time."""
    monkeypatch.setattr(graphs_module, "Graphs", UnkindGraphs)
    monkeypatch.setattr(planning, "Training", partial(planning.Training, _shared=recordings))


def injected_pair(trained, calls=3, **how):
    """An eager model, an injected copy whose blocks have graphs, and those graphs."""
    eager, ours = twice(trained)
    report = kw.inject(ours, graphs=True, **how)
    (found,) = report.graphs
    for seed in range(calls):
        same(eager, ours, data(seed))
    return eager, ours, found.of_blocks


def counts(graphs):
    """Captures and replays of forwards, and of backwards."""
    return [(r.recorded, r.replayed) for r in graphs.recorders]


def replayed(graphs, run):
    """How many forwards and backwards a function replays."""
    before = [n for _, n in counts(graphs)]
    run()
    return tuple(n - b for (_, n), b in zip(counts(graphs), before, strict=True))
