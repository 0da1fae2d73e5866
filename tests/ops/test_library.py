"""Under torch.compile and the dispatcher: whole graphs, the same bits, few compilations."""

import inspect
import shutil

import pytest
import torch
from declared import ALL, OPS, every_op, full, small, tensors
from everything import EVERYTHING, share
from numerics import as_tuple
from torch._dynamo.testing import CompileCounterWithBackend

import kernelwright
from kernelwright import use_backend
from kernelwright.ops.case import Inputs

# Inductor needs a C++ compiler; what it is given is what aot_eager runs
COMPILER = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"
# an op is one node for Inductor, whichever op it is; the others are several nodes each
INDUCTOR = {*share(OPS, 4), *(op for op in ALL if op not in OPS)}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def public(op):
    return getattr(kernelwright, op.name)


def compiler_of(op):
    return COMPILER if op in INDUCTOR else "aot_eager"


def compiled(function, backend="aot_eager", **how):
    return torch.compile(function, fullgraph=True, backend=backend, **how)


def equal(got, expected):
    got, expected = as_tuple(got), as_tuple(expected)
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


@every_op(ALL)
def test_an_op_is_a_public_function_of_its_name(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    assert equal(public(op)(**arguments), op.call(arguments))


def telling(op):
    """What a schema could be wrong about: the full case, and one for each set of parts that are
    absent or views."""
    found = {}
    for case in (full(op), *small(op)):
        given = case.arguments(Inputs(torch.float32))
        absent = tuple(n for n, a in given.items() if a is None)
        views = tuple(n for n, t in tensors(given).items() if not t.is_contiguous())
        if absent or views or case is full(op):
            found.setdefault((absent, views), case)
    return found.values()


def every_telling_case(ops):
    found = [pytest.param(op, c, id=f"{op.name}-{c.name}") for op in ops for c in telling(op)]
    return pytest.mark.parametrize(("op", "case"), found)


@every_telling_case(OPS)
def test_the_library_op_keeps_its_schema(op, case):
    """opcheck: schema, autograd registration, fake kernel, AOT dispatch with dynamic shapes."""
    arguments = case.arguments(Inputs(torch.float32))
    for t in tensors(arguments).values():
        if t.is_floating_point() and t.is_leaf:
            t.requires_grad_()
    check(op.library_op, op, case, arguments)


def check(library_op, op, case, arguments):
    """AOT dispatch, which takes nearly all of the time, with the fullest case of each op."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    dispatch = ("test_aot_dispatch_dynamic",) if EVERYTHING or case is full(op) else ()
    given = tuple(arguments[n] for n in op.arguments)
    torch.library.opcheck(library_op, given, test_utils=checks + dispatch)


@every_telling_case([op for op in OPS if op.inplace])
def test_the_inplace_library_op_declares_what_it_changes(op, case):
    arguments = case.arguments(Inputs(torch.float32))
    check(op.inplace_op, op, case, arguments)


@every_op(ALL)
def test_compiled_is_eager_bit_for_bit(op):
    arguments = full(op).arguments(Inputs(torch.bfloat16))
    got = compiled(public(op), compiler_of(op))(**arguments)
    expected = public(op)(**arguments)
    assert equal(got, expected)
    for g, e in zip(as_tuple(got), as_tuple(expected), strict=True):
        assert (g.dtype, g.stride()) == (e.dtype, e.stride())


@every_op(ALL)
def test_compiled_gradients_are_those_of_eager_bit_for_bit(op):
    def gradients(function):
        given = full(op).arguments(Inputs(torch.bfloat16))
        wanted = {n: t.detach().clone() for n, t in tensors(given).items() if t.is_floating_point()}
        for t in wanted.values():
            t.requires_grad_()
        outputs = as_tuple(function(**given | wanted))
        torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
        return tuple(t.grad for t in wanted.values())

    assert equal(gradients(compiled(public(op), compiler_of(op))), gradients(public(op)))


@every_op(share((op for op in OPS if op.exact), 2))
def test_a_compiled_exact_call_is_the_eager_chain(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    for chain in op.exact:
        got = compiled(public(op))(**arguments, exact=chain)
        assert equal(got, public(op)(**arguments, exact=chain)), chain


def outputs_taken(op):
    """The outputs that the public function takes as arguments."""
    return [n for n in op.outputs if n in inspect.signature(public(op)).parameters]


@every_op(share((op for op in OPS if outputs_taken(op)), 2))
def test_compiled_out_is_written_and_returned(op):
    arguments = full(op).arguments(Inputs(torch.bfloat16))
    expected = as_tuple(public(op)(**arguments))
    names = outputs_taken(op)
    given = {n: torch.empty_like(e) for n, e in zip(names, expected, strict=True)}
    got = as_tuple(compiled(public(op))(**arguments, **given))
    for g, o, e in zip(got, given.values(), expected, strict=True):
        assert torch.equal(o, e)
        assert g.data_ptr() == o.data_ptr()


@every_op([op for op in OPS if op.inplace])
def test_compiled_inplace_changes_the_input(op):
    arguments = full(op).arguments(Inputs(torch.bfloat16))
    expected = as_tuple(public(op)(**arguments))
    got = as_tuple(compiled(public(op))(**arguments, inplace=True))
    for name, g, e in zip(op.inplace, got, expected, strict=True):
        assert torch.equal(arguments[name], e)
        assert torch.equal(g, e)


def test_use_backend_inside_a_graph_and_around_it_decides_when_the_graph_runs():
    x = torch.randn(3, 64)

    @compiled
    def inside(x):
        with use_backend("cuda"):
            return kernelwright.rmsnorm(x)

    @compiled
    def around(x):
        return kernelwright.rmsnorm(x)

    with pytest.raises(ValueError, match="rmsnorm: backend 'cuda': tensors are on cpu"):
        inside(x)
    expected = kernelwright.rmsnorm(x)
    assert torch.equal(around(x), expected)
    with use_backend("cuda"), pytest.raises(ValueError, match="rmsnorm: backend 'cuda'"):
        around(x)
    assert torch.equal(around(x), expected)


def longer(arguments, times):
    """The arguments with the leading dimension of their first tensor repeated, in all of them."""
    first = next(iter(tensors(arguments).values()))
    return {
        n: a.repeat(times, *[1] * (a.ndim - 1))
        if isinstance(a, torch.Tensor) and a.ndim > 1 and a.shape[0] == first.shape[0]
        else a
        for n, a in arguments.items()
    }


@every_op(share(OPS, 3, start=1))
def test_fifty_row_counts_compile_a_handful_of_graphs(op):
    arguments = full(op).arguments(Inputs(torch.bfloat16))
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(public(op), counter)
    for times in range(1, 51):
        given = longer(arguments, times)
        assert equal(function(**given), public(op)(**given))
    assert counter.frame_count < 5


def sequences(tokens):
    """The ops of a block as a model of varying length calls them."""
    hidden = torch.randn(2, tokens, 64)
    temb = torch.randn(2, 1, 6, 64)
    heads = torch.randn(2, tokens, 2, 32)
    cos, sin = torch.randn(2, tokens, 16).unbind()
    return hidden, temb, heads, cos, sin


def block(hidden, temb, heads, cos, sin):
    shift, scale, gate = temb.unbind(2)[:3]
    query, key = kernelwright.qk_norm_rope(heads, heads, cos=cos, sin=sin)
    query, key = kernelwright.rope_1d(query, key)
    query, key = kernelwright.rope_3d(query, key, query.shape[1], 1, 1)
    mixed = (query + key).flatten(2)
    normed, hidden = kernelwright.gated_residual_norm(
        hidden, mixed, gate, scale=scale, shift=shift, kind="layer"
    )
    return kernelwright.swiglu(normed), kernelwright.adaln_rmsnorm(hidden, None, scale, shift)


def test_fifty_sequence_lengths_of_a_block_compile_a_handful_of_graphs():
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(block, counter)
    for tokens in range(2, 52):
        given = sequences(tokens)
        assert equal(function(*given), block(*given))
    assert counter.frame_count < 5


def test_a_dynamic_graph_serves_other_lengths_and_keeps_the_bits():
    counter = CompileCounterWithBackend(COMPILER)
    function = compiled(block, counter, dynamic=True)
    function(*sequences(7))
    compilations = counter.frame_count
    for tokens in (7, 2, 31, 12):
        given = sequences(tokens)
        assert equal(function(*given), block(*given))
    assert counter.frame_count == compilations


@pytest.mark.parametrize("recorded", [True, False])
def test_a_graph_that_records_no_gradient_goes_around_it(recorded):
    nodes = []

    def backend(graph, example):
        nodes.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph

    x = torch.randn(3, 64)
    with torch.set_grad_enabled(recorded):
        expected = kernelwright.rmsnorm(x)
        got = torch.compile(kernelwright.rmsnorm, backend=backend, fullgraph=True)(x)
    assert torch.equal(got, expected)
    (node,) = nodes
    assert node == f"kernelwright.rmsnorm{'' if recorded else '_unrecorded'}.default"
