"""CUDA graphs and torch.compile: the same bits as a plain call, and a clear error when cold."""

import pytest
import torch
from declared import every_op, full
from numerics import as_tuple

from kernelwright.ops.case import Inputs
from kernelwright.ops.op import Op, registry

BACKENDS = ("triton", "cuda")
OPS = [op for op in registry().values() if isinstance(op, Op)]


@pytest.mark.parametrize("backend", BACKENDS)
@every_op(OPS)
def test_a_replay_on_new_data_gives_the_bits_of_a_call(op, backend):
    case = full(op)
    first, second = (case.arguments(Inputs(torch.bfloat16, "cuda", seed)) for seed in (0, 1))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op.call(first, backend=backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = as_tuple(op.call(first, backend=backend))
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            value.copy_(second[name])
    graph.replay()
    for got, want in zip(outs, as_tuple(op.call(second, backend=backend)), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cold_kernel_in_capture_says_what_to_do(backend):
    op = registry()["rmsnorm"]
    x = torch.randn(3, 1096 + 8 * BACKENDS.index(backend), device="cuda")
    graph = torch.cuda.CUDAGraph()
    cold = pytest.raises(RuntimeError, match=r"rmsnorm: .* call the op once")
    with cold, torch.cuda.graph(graph):
        op(x, None, 1e-6, backend=backend)
    assert op(x, None, 1e-6, backend=backend).isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@every_op(OPS)
def test_compiled_gives_the_bits_of_eager(op, backend):
    case = full(op)
    arguments = case.arguments(Inputs(torch.bfloat16, "cuda"))
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: op.call(a, backend=backend), fullgraph=True)
    got, want = (as_tuple(f(arguments)) for f in (compiled, lambda a: op.call(a, backend=backend)))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_thread_that_never_touched_cuda_can_launch():
    import threading

    op = registry()["rmsnorm"]
    x = torch.randn(4, 64, device="cuda")
    want = {b: op(x, None, 1e-6, backend=b) for b in BACKENDS}
    found = {}
    threads = [
        threading.Thread(target=lambda b=b: found.update({b: op(x, None, 1e-6, backend=b)}))
        for b in BACKENDS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[b], want[b]) for b in BACKENDS)
