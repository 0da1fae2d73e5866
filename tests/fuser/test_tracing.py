"""The ops of a function, as they are written down."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from kernelwright.backends.torch_internals import functional
from kernelwright.fuser.tracing import trace
from kernelwright.fuser.watched_forward import CannotRecord

WEIGHT, TABLE = torch.randn(3, 3), torch.randn(2, 3)


def views(x, y):
    a, b, c = x.unflatten(-1, (3, -1)).transpose(0, 1).chunk(3, 0)
    return torch.cat([a, b], -1).flatten(1), c[..., None].expand(-1, -1, -1, 2), y.t()[1:]


def norms(x, y):
    mean = x.pow(2).mean(-1, keepdim=True)
    return F.layer_norm(x, (3,)), F.rms_norm(y, (3,)), x * torch.rsqrt(mean + 1e-6)


def several_results(x, y):
    values, places = torch.topk(x, 2)
    return values + 1, places, *torch.var_mean(y, -1)


def reads_other_tensors(x, y):
    return F.linear(x, WEIGHT) + TABLE, y @ WEIGHT


def numbers(x, y):
    sizes = torch.tensor([2, 1]) * 2 - torch.tensor([2, 1])
    return x * torch.tensor(2.0), y.split(sizes.tolist(), -1), torch.arange(3) + x


def writes(x, y):
    total = x.clone()
    total.add_(y).mul_(2)
    total[:, 0] = 0
    return total, torch.where(total > 0, x, y)


def attends(x, y):
    q, k = x[None], y[None]
    return F.scaled_dot_product_attention(q, k, q, is_causal=True), (q @ k.mT).softmax(-1)


def hands_on(x, y):
    return y, x, y


def flat(function):
    return lambda *tensors: pytree.tree_leaves(function(*tensors))


def described(graph):
    """Nodes with what they are given, whatever they are called."""
    numbers = {node: i for i, node in enumerate(graph.nodes)}

    def value(v):
        if isinstance(v, tuple | list):
            return tuple(map(value, v))
        if isinstance(v, torch.Tensor):
            return v.shape, v.stride(), v.dtype, v.device
        return numbers.get(v, v) if isinstance(v, torch.fx.Node) else v

    return [
        (
            node.op,
            None if node.op in ("get_attr", "placeholder") else node.target,
            torch.fx.node.map_aggregate((node.args, node.kwargs), value),
            value(node.meta.get("val")),
        )
        for node in graph.nodes
    ]


FUNCTIONS = (views, norms, several_results, numbers, attends, hands_on)


CASES = [(f, real) for f in FUNCTIONS for real in (True, False) if real or f is not numbers]


@pytest.mark.parametrize(("function", "real"), CASES)
def test_ops_and_layouts_are_those_of_make_fx(function, real):
    given = torch.randn(2, 3), torch.randn(2, 3)
    with torch.no_grad():
        whole = make_fx(flat(function), tracing_mode="real" if real else "fake")(*given)
        ours = trace(flat(function), given, real=real)
    for graph in (whole.graph, ours.graph):
        graph.eliminate_dead_code()
    assert described(ours.graph) == described(whole.graph)


@pytest.mark.parametrize("function", [reads_other_tensors, writes])
def test_what_was_written_down_gives_the_same_results(function):
    given = torch.randn(2, 3), torch.randn(2, 3)
    with torch.no_grad():
        ours = trace(functional(flat(function)), given)
    root = {n.target: ours.constants[n.name] for n in ours.graph.find_nodes(op="get_attr")}
    others = torch.randn(2, 3), torch.randn(2, 3)
    found = torch.fx.GraphModule(root, ours.graph)(*others)
    assert all(map(torch.equal, found, function(*others)))
    called = ours.graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Tensor)
    assert not called


def test_tensors_that_are_no_inputs_are_constants_once_each():
    given = torch.randn(2, 3), torch.randn(2, 3)
    ours = trace(flat(reads_other_tensors), given)
    assert {id(t) for t in ours.constants.values()} == {id(WEIGHT), id(TABLE)}
    assert list(ours.constants) == [n.name for n in ours.graph.find_nodes(op="get_attr")]


@pytest.mark.parametrize(
    "reads",
    [lambda x: x.sum().item(), lambda x: bool((x > 0).any()), lambda x: x[x > 0].sum().item()],
)
def test_a_value_read_on_the_host_ends_the_recording(reads):
    def function(x):
        reads(x)
        return [x]

    with pytest.raises(CannotRecord, match="read on the host"):
        trace(functional(function), [torch.randn(4)])


def test_an_op_is_asked_about_before_it_runs():
    def refuse(op):
        if op is torch.ops.aten.rand.default:
            raise ValueError("random")

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="random"):
        trace(lambda x: [x * torch.rand(2)], [torch.ones(2)], refuse)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_computed_unless_real():
    def function(x):
        seen.append(x)
        return [torch.nan_to_num(x) * 2]

    seen = []
    given = [torch.full((2, 3), torch.nan)]
    ours = trace(function, given, real=False)
    assert isinstance(seen[0], FakeTensor)
    assert len(ours.graph.nodes) == 4


def test_a_function_of_torch_compile_refuses_and_is_not_compiled_meanwhile():
    """It would be compiled as it is seen under our mode, and kept."""

    def function(x):
        compiled.append(1)
        return x * 2

    compiled = []
    whole = torch.compile(function, backend="eager")
    with pytest.raises(RuntimeError, match="dynamo-optimized"):
        trace(lambda x: [whole(x)], [torch.ones(2)])
    assert not compiled
    assert torch.equal(whole(torch.ones(2)), torch.full((2,), 2.0))


def test_functions_of_torch_compile_run_in_other_threads_meanwhile():
    whole = torch.compile(lambda x: x * 2, backend="eager")

    def function(x):
        with ThreadPoolExecutor(1) as pool:
            elsewhere.append(pool.submit(whole, torch.ones(2)).result())
        return [x + 1]

    elsewhere = []
    trace(function, [torch.ones(2)])
    assert torch.equal(elsewhere[0], torch.full((2,), 2.0))


def test_two_threads_write_down_their_own():
    def function(x, y):
        for _ in range(20):
            x = x * 2 + y
        return [x]

    given = torch.ones(2), torch.ones(2)
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(trace, function, given).result() for _ in range(8)]
    assert {len(m.graph.nodes) for m in made} == {2 + 40 + 1}
