"""A recorder for graphs on the CPU that replays what a CUDA graph replays.

It records every operation that reaches the kernels, with its tensors, and replays those; no Python
of the model runs then. So whatever a CUDA graph bakes in is baked in here too.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import import_utils

from kernelwright.inject.graphs import buffers
from kernelwright.inject.graphs import graphs as graphs_module
from kernelwright.inject.graphs.graphs import Graphs, capturing

from .stand_in import Again, tensors

# these synchronise with the CPU, which is an error in a CUDA graph
WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


def _chooses(operation, args):
    """Whether it indexes with a mask: how much that gives has to be known on the CPU."""
    indexes = operation.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put)
    return indexes and any(i is not None and i.dtype == torch.bool for i in args[1])


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation in WAITS or _chooses(operation, args):
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        self.done.append((operation, args, kwargs, result))
        return result


class Tape(Again):
    """Replays the operations, each into the memory of its first result."""

    def record(self, run, device):
        self.recorded += 1
        with Operations() as tape:
            result = run()

        @torch.no_grad()
        def replay():
            self.replayed += 1
            with torch.autocast("cpu", enabled=False):  # they are what autocast made of others
                for operation, args, kwargs, first in tape.done:
                    again = operation(*args, **kwargs)
                    for old, new in zip(tensors(first), tensors(again), strict=True):
                        _into(old, new)

        return replay, result


def _into(old, new):
    """Views and in-place results need no copy."""
    if new.data_ptr() != old.data_ptr() and old.numel():
        with torch.inference_mode(old.is_inference()):
            old.untyped_storage().copy_(new.untyped_storage())


class TapeGraphs(Graphs):
    recorder = Tape


def _tolist(tensor):
    """Reads each number by an operation that a recorder sees, as it sees a GPU's copy to the host;
    PyTorch reads a tensor of the CPU without one."""
    return [_tolist(part) for part in tensor] if tensor.ndim else tensor.item()


@contextmanager
def graphs_on_the_cpu():
    """Make `graphs=True` record on the CPU during the `with` block."""
    usual = graphs_module.Graphs, buffers.ALIGNMENT, import_utils.is_cuda_stream_capturing
    tolist, torch.Tensor.tolist = torch.Tensor.tolist, _tolist
    graphs_module.Graphs = TapeGraphs
    buffers.ALIGNMENT = 64  # alignment of new memory; 512 on a GPU
    import_utils.is_cuda_stream_capturing = lambda: capturing() or Again.replaying
    try:
        yield
    finally:
        graphs_module.Graphs, buffers.ALIGNMENT, import_utils.is_cuda_stream_capturing = usual
        torch.Tensor.tolist = tolist
