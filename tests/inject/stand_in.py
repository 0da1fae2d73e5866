"""Graphs without a GPU: a stand-in for the recorder runs the captured function again."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from kernelwright.inject.graphs import buffers
from kernelwright.inject.graphs.graphs import Graphs


class Again:
    """Runs a function again, into the memory of its first results."""

    device_type = "cpu"
    replaying = False

    def __init__(self, partner=None):
        self.recorded = self.replayed = self.released = 0

    def busy(self):
        return Again.replaying

    def exclusive(self, device):
        return nullcontext()

    def stream(self):
        return None

    def mark(self, device, stream):
        pass

    def beside(self, device):
        return nullcontext()

    def release(self):
        self.released += 1

    def record(self, run, device):
        self.recorded += 1
        result, autocast = run(), as_now("cpu")

        def replay():
            self.replayed += 1
            Again.replaying = True
            with autocast:  # what it is at a replay makes no difference to a graph
                again = run()
            Again.replaying = False
            for old, new in zip(tensors(result), tensors(again), strict=True):
                old.untyped_storage().copy_(new.untyped_storage())

        return replay, result


class CpuGraphs(Graphs):
    recorder = Again

    @property
    def counts(self):
        return self._recorder.recorded, self._recorder.replayed


@pytest.fixture(autouse=True)
def alignment_of_new_memory(monkeypatch):
    """Alignment of new memory on the CPU; on a GPU it is 512."""
    monkeypatch.setattr(buffers, "ALIGNMENT", 64)


def as_now(device_type):
    """A context in which autocast is what it is now."""
    on, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return torch.autocast(device_type, dtype, enabled=on)


def tensors(tree):
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x, scale=1.0):
        return self.proj(x) * scale


def model():
    return Scaled().eval().requires_grad_(False)


def called(graphs, module, *args, **kwargs):
    return graphs(module, type(module).forward, args, kwargs)


def function(forward):
    """A function of tensors as the forward of a model without weights."""
    module, graphs = nn.Identity().eval(), CpuGraphs()
    return graphs, lambda *args, **kwargs: graphs(
        module, lambda self, *a, **k: forward(*a, **k), args, kwargs
    )


def data(seed=0, *shape):
    return torch.randn(shape or (2, 8), generator=torch.Generator().manual_seed(seed))
