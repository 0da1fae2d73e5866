"""Which calls share a graph, and which run without one and why."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

import kernelwright as kw
from kernelwright.inject.graphs.buffers import Refusal
from kernelwright.inject.graphs.graphs import Graphs
from kernelwright.inject.graphs.key import Call, check_surroundings

from .stand_in import CpuGraphs, alignment_of_new_memory, called, data, model  # noqa: F401


def key(*args, **kwargs):
    return Call(args, kwargs, "cpu").key


VALUES = [1, True, 1.0, 0.0, -0.0, 0, False, None, "1", "None", 1j, torch.float32, (1,), [1]]


def test_values_that_differ_make_signatures_that_differ():
    x = data()
    assert len({key(x, v) for v in VALUES}) == len(VALUES)
    assert len({key(x, a=v) for v in VALUES}) == len(VALUES)
    assert key(x, float("nan")) == key(x, float("nan"))


def test_a_signature_is_the_layout_of_a_tensor_and_not_its_value():
    x = data(0, 4, 4)
    assert key(x) == key(data(1, 4, 4))
    others = [x.double(), x.t(), x[:2], x[None], data(0, 4, 8)[:, :4], x.view(-1)[3:7]]
    assert len({key(o) for o in (x, *others)}) == 1 + len(others)


def test_the_alignment_of_a_tensor_is_part_of_its_signature():
    x = data(0, 64)
    assert key(x[:4]) != key(x[1:5])


def test_a_default_device_looks_on_at_nothing():
    with torch.device("cpu"):
        check_surroundings()
    with torch.overrides.BaseTorchFunctionMode(), pytest.raises(Refusal, match="function mode"):
        check_surroundings()


def test_one_element_is_the_same_wherever_it_lies():
    steps = data(0, 64)
    assert len({key(steps[i]) for i in range(64)}) == 1
    assert len({key(steps[i].expand(2)) for i in range(64)}) == 1


def test_containers_are_part_of_the_signature():
    Pair, Point = namedtuple("Pair", "a b"), namedtuple("Point", "a b")
    x, y = data(), data(1)
    given = [
        ([x, y],),
        ((x, y),),
        ({"a": x, "b": y},),
        ({"a": x, "c": y},),
        (Pair(x, y),),
        (Point(x, y),),
        (OrderedDict(a=x, b=y),),
        ([x], [y]),
        ([[x, y]],),
        ([x, [y]],),
        ([x, y], []),
        ([x, y], ()),
        ([x, y], {}),
        (x, y),
    ]
    assert len({key(*args) for args in given}) == len(given)
    for args in given:
        call = Call(args, {"k": [x, 2]}, "cpu")
        assert call.tensors[-1] is x
        rebuilt, named = call.with_tensors([*map(torch.clone, call.tensors)])
        assert Call(rebuilt, named, "cpu").key == call.key
        assert all(new is not old for new, old in zip(rebuilt, args, strict=True) if old != ())
        assert named["k"] is not call._given[1]["k"]


SWITCHES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "attention kernels": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "default device": lambda: torch.device("meta"),
    "backend of our ops": lambda: kw.use_backend("torch"),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_what_decides_which_kernels_run_is_in_the_signature(switch):
    x = data()
    before = key(x)
    with switch():
        assert key(x) != before
    assert key(x) == before


def test_inference_mode_is_more_than_no_gradients():
    x = data()
    with torch.no_grad():
        before = key(x)
    with torch.inference_mode():
        assert key(x) != before


def test_the_precision_of_float32_products_is_in_the_signature():
    x, before = data(), torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        exact = key(x)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert key(x) != exact
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_the_attention_backend_of_diffusers_is_in_the_signature():
    from diffusers.models.attention_dispatch import attention_backend

    x = data()
    before = key(x)
    with attention_backend("_native_math"):
        assert key(x) != before


def refused(graphs, module, *args, **kwargs):
    """The single reason why three calls ran without a graph, with the right result."""
    for _ in range(3):
        got = called(graphs, module, *args, **kwargs)
        assert torch.equal(got, type(module).forward(module, *args, **kwargs))
    assert graphs.captured == 0
    ((reason, count),) = graphs.reasons.items()
    assert count == 3
    return reason


def test_tensors_that_are_not_on_cuda_run_without_a_graph():
    assert refused(Graphs(), model(), data()) == "inputs on cpu"


class Reads(nn.Module):
    def forward(self, x, cache):
        return x + cache.get_seq_length()


def test_an_input_that_is_an_object_runs_without_a_graph():
    class Length:
        def get_seq_length(self):
            return 1

    reason = refused(CpuGraphs(), Reads().eval(), data(), Length())
    assert reason == "an input of type Length"


def test_a_cache_that_grows_runs_without_a_graph():
    from transformers import DynamicCache

    reason = refused(CpuGraphs(), Reads().eval(), data(), DynamicCache())
    assert reason.startswith("a DynamicCache; a cache of fixed size")


def test_training_mode_runs_without_a_graph_until_it_ends():
    module, graphs = model().train(), CpuGraphs()
    assert refused(graphs, module, data()) == "training mode"
    module.eval()
    for seed in range(3):
        called(graphs, module, data(seed))
    assert graphs.captured == 1


def test_gradients_run_without_a_graph():
    module = model().requires_grad_(True)
    assert refused(CpuGraphs(), module, data()) == "gradients are recorded"
    x = data().requires_grad_()
    assert refused(CpuGraphs(), model(), x) == "gradients are recorded"
    with torch.no_grad():
        graphs = CpuGraphs()
        for _ in range(2):
            called(graphs, module, x)
    assert graphs.captured == 1


def test_an_input_with_a_gradient_leaves_no_trace_in_a_graph():
    """An encoder that was called without gradients, then with embeddings that are trained."""
    graphs, module = CpuGraphs(), model()
    for seed in range(3):
        called(graphs, module, data(seed))
    x = data(3).requires_grad_()
    result = called(graphs, module, x)
    assert result.requires_grad
    (graph,) = next(iter(graphs._models.values())).graphs.values()
    assert not any(t.requires_grad for t in graph._memory)
    assert torch.equal(called(graphs, module, data(3)), result)


def test_a_replay_is_dropped_if_switches_have_changed_since_the_last():
    graphs, module = CpuGraphs(), model()

    def run(seed):
        result = called(graphs, module, data(seed))
        assert torch.equal(result, module(data(seed)))
        return graphs.counts[1]

    before = [run(seed) for seed in range(4)][-1]
    with torch.autocast("cpu", torch.bfloat16):
        assert run(4) == before + 1  # replayed for nothing, which is noticed
        run(5)  # captured
        before = run(6)
    # from then on switches are read first
    for seed in range(7, 10):
        assert run(seed) == before + 1
        with torch.autocast("cpu", torch.bfloat16):
            before = run(seed)
            assert before == graphs.counts[1]
    assert graphs.captured == 2


def test_hooks_on_all_modules_run_without_a_graph():
    handle = nn.modules.module.register_module_forward_hook(lambda *a: None)
    try:
        assert refused(CpuGraphs(), model(), data()) == "a hook on all modules"
    finally:
        handle.remove()


def test_modes_that_watch_every_operation_run_without_a_graph():
    from torch.overrides import TorchFunctionMode
    from torch.utils.flop_counter import FlopCounterMode

    class Looks(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with FlopCounterMode(display=False) as counter:
        assert refused(CpuGraphs(), model(), data()) == "inside a dispatch mode"
    assert counter.get_total_flops()
    with Looks():
        assert refused(CpuGraphs(), model(), data()) == "inside a torch function mode"


def test_vmap_runs_without_a_graph():
    module, graphs = model(), CpuGraphs()
    x = data(0, 3, 8)
    assert torch.equal(torch.vmap(lambda row: called(graphs, module, row))(x), module(x))
    assert graphs.reasons == {"inside a function transform": 1}
