"""Gradients: right, repeatable, and only where they are asked for."""

import pytest
import torch
from declared import ALL, DTYPES, OPS, every_case_in_turn, every_op, full, small, tensors
from everything import share
from numerics import as_tuple, widened
from torch.utils.checkpoint import checkpoint

from kernelwright.backends.triton import interpreting
from kernelwright.checking.gradients import gradients, hold_gradients, leaves, seeds
from kernelwright.ops import apply_rope, rmsnorm
from kernelwright.ops.case import Case, Inputs
from kernelwright.ops.op import registry
from kernelwright.ops.row.backward_triton import MAX_WIDTH

KERNELS = [op for op in OPS if op.backward is not None]


def interpreted(test):
    skip = pytest.mark.skipif(not interpreting(), reason="a GPU is here: tests/gpu runs them")
    # numpy says so where a GPU goes on in silence: exp(89) is infinite
    quiet = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
    return skip(quiet(pytest.mark.usefixtures("rounding_interpreter")(test)))


@every_op(ALL)
def test_the_gradient_is_the_derivative(op):
    """gradcheck: against differences of the function itself, in float64, on the public path."""
    arguments = {n: widened(a) for n, a in full(op).arguments(Inputs(torch.float32)).items()}
    arguments, wanted = leaves(arguments)

    def function(*values):
        return op.call(arguments | dict(zip(wanted, values, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(wanted.values()), fast_mode=True)


@every_case_in_turn(ALL)
def test_gradients_are_as_close_to_float64_as_those_of_eager(op, case, dtype):
    hold_gradients(op, case, dtype)


@interpreted
@every_case_in_turn(KERNELS, [d for d in DTYPES if d.values != (torch.float16,)])
def test_gradients_of_kernels_are_as_close_to_float64_as_those_of_eager(op, case, dtype):
    hold_gradients(op, case, dtype, backend="triton")


@every_op(ALL)
def test_a_second_backward_gives_the_same_and_leaves_what_was_saved_alone(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    arguments, wanted = leaves(arguments)
    before = {n: t.detach().clone() for n, t in tensors(arguments).items()}
    outputs = op.call(arguments)
    values = [o.detach().clone() for o in as_tuple(outputs)]
    first = [g.clone() for g in gradients(outputs, wanted, retain_graph=True)]
    second = gradients(outputs, wanted)
    assert all(map(torch.equal, first, second))
    assert all(torch.equal(before[n], t) for n, t in tensors(arguments).items())
    assert all(map(torch.equal, values, as_tuple(outputs)))


@every_op(ALL)
def test_one_gradient_alone_is_that_of_all_together(op):
    """Weight-only, input-only: each argument by itself."""
    arguments = full(op).arguments(Inputs(torch.float32))
    all_leaves, wanted = leaves(arguments)
    together = dict(zip(wanted, gradients(op.call(all_leaves), wanted), strict=True))
    for name, expected in together.items():
        alone, wanted = leaves(arguments, {name})
        (got,) = gradients(op.call(alone), wanted)
        assert torch.equal(got, expected), name


@every_op(ALL)
def test_an_expanded_gradient_is_read_as_what_it_says(op):
    """sum().backward() hands in one element with stride 0."""
    arguments = full(op).arguments(Inputs(torch.float32))
    summed, wanted = leaves(arguments)
    torch.stack([o.sum() for o in as_tuple(op.call(summed))]).sum().backward()
    dense, other = leaves(arguments)
    outputs = as_tuple(op.call(dense))
    expected = gradients(outputs, other, [torch.ones_like(o) for o in outputs])
    assert all(map(torch.equal, [t.grad for t in wanted.values()], expected))


@every_op(ALL)
def test_an_input_used_twice_gets_the_sum(op):
    """Residual fan-out: the input goes on beside the op."""
    arguments, wanted = leaves(full(op).arguments(Inputs(torch.float32)))
    first = next(iter(wanted))
    (alone, *_) = gradients(op.call(arguments), wanted)
    outputs = as_tuple(op.call(arguments))
    beside = arguments[first] * 2
    (got, *_) = torch.autograd.grad(
        (*outputs, beside), list(wanted.values()), [*seeds(outputs), torch.ones_like(beside)]
    )
    assert torch.equal(got, alone + 2)


@every_op([op for op in OPS if len(op.outputs) > 1])
def test_an_output_left_out_of_the_loss_counts_as_zero(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    for used in range(len(op.outputs)):
        given, wanted = leaves(arguments)
        outputs = as_tuple(op.call(given))
        incoming = seeds(outputs)
        got = gradients(outputs[used], wanted, [incoming[used]], allow_unused=True)
        given, wanted = leaves(arguments)
        zeroed = [g if i == used else torch.zeros_like(g) for i, g in enumerate(incoming)]
        expected = gradients(op.call(given), wanted, zeroed)
        for name, g, e in zip(wanted, got, expected, strict=True):
            assert torch.equal(torch.zeros_like(e) if g is None else g, e), name


@every_op(ALL)
def test_a_checkpoint_gives_the_same_gradients(op):
    arguments = full(op).arguments(Inputs(torch.bfloat16))
    found = []
    for recomputed in (False, True):
        given, wanted = leaves(arguments)

        def function(*values, given=given, wanted=wanted):
            return op.call(given | dict(zip(wanted, values, strict=True)))

        values = wanted.values()
        outputs = (
            checkpoint(function, *values, use_reentrant=False) if recomputed else function(*values)
        )
        found.append(gradients(outputs, wanted))
    assert all(map(torch.equal, *found))


@every_op(ALL)
def test_no_grad_records_nothing(op):
    arguments, _ = leaves(full(op).arguments(Inputs(torch.float32)))
    with torch.no_grad():
        outputs = as_tuple(op.call(arguments))
    assert not any(o.requires_grad or o.grad_fn is not None for o in outputs)
    detached = {n: a.detach() if n in tensors(arguments) else a for n, a in arguments.items()}
    assert all(map(torch.equal, outputs, as_tuple(op.call(detached))))


@every_op(ALL)
def test_recording_changes_no_bit_of_the_result(op):
    arguments = full(op).arguments(Inputs(torch.bfloat16))
    recorded, _ = leaves(arguments)
    outputs = as_tuple(op.call(recorded))
    assert all(o.requires_grad for o in outputs)
    assert all(map(torch.equal, outputs, as_tuple(op.call(arguments))))


@every_op(ALL)
def test_empty_tensors_have_empty_gradients(op):
    empty = [
        c for c in small(op)
        if not all(t.numel() for t in tensors(c.arguments(Inputs(torch.float32))).values())
    ]  # fmt: skip
    for case in empty:
        arguments, wanted = leaves(case.arguments(Inputs(torch.float32)))
        for t, g in zip(
            wanted.values(),
            gradients(op.call(arguments), wanted, materialize_grads=True),
            strict=True,
        ):
            assert g.shape == t.shape
            assert not g.count_nonzero(), "what no row touches has no gradient"


@interpreted
@every_op(share(KERNELS, 3))
def test_gradients_of_kernels_repeat_alone_and_together(op):
    """The sums over rows have one order, whichever gradients are asked for."""
    arguments = full(op).arguments(Inputs(torch.bfloat16))
    all_leaves, wanted = leaves(arguments)
    outputs = op.call(all_leaves, backend="triton")
    together = dict(zip(wanted, gradients(outputs, wanted, retain_graph=True), strict=True))
    again = gradients(outputs, wanted)
    assert all(map(torch.equal, together.values(), again))
    for name in set(together) - {"cos", "sin"}:
        alone, wanted = leaves(arguments, {name})
        (got,) = gradients(op.call(alone, backend="triton"), wanted)
        assert torch.equal(got, together[name]), name


@interpreted
def test_rows_that_share_a_modulation_may_lie_apart():
    """[1, S, D] over [B, S, D]: the rows of one token in every batch share it."""
    op = registry()["gated_residual_norm"]

    def arguments(inputs):
        gate, scale = (inputs.normal(1, 5, 64) for _ in "gs")
        x, residual, shift = inputs.normal(3, 5, 64), inputs.normal(3, 5, 64), inputs.normal(3, 64)
        parts = {"gate": gate, "weight": None, "bias": None, "scale": scale, "shift": shift}
        return {"residual": residual, "x": x, **parts, "kind": "layer", "eps": 1e-6}

    hold_gradients(op, Case("apart", arguments), torch.bfloat16, backend="triton")


@interpreted
def test_rows_that_are_not_there_add_nothing_without_eps():
    """The tile of the last rows is not full: 1 / sqrt(0 + 0) of a missing row is infinite."""
    op = registry()["qk_norm_rope"]

    def arguments(inputs):
        query, key = inputs.normal(1, 3, 1, 64), inputs.normal(1, 3, 1, 64)
        weights = {"q_weight": inputs.weight(64), "k_weight": inputs.weight(64)}
        plain = {"cos": None, "sin": None, "eps": 0.0, "across_heads": False, "layout": "half"}
        return {"query": query, "key": key, **weights, **plain}

    hold_gradients(op, Case("without eps", arguments), torch.float32, backend="triton")


@interpreted
def test_a_named_backend_that_cannot_hold_the_row_says_so():
    x = torch.randn(2, MAX_WIDTH + 1, requires_grad=True)
    with pytest.raises(
        ValueError, match=r"^rmsnorm: backend 'triton' cannot run this: width 16385"
    ):
        rmsnorm(x, backend="triton").sum().backward()


@interpreted
@every_op(share(KERNELS, 3, start=1))
def test_a_compiled_backward_of_kernels_has_the_bits_of_eager(op):
    """The fake backward promises the layouts that the kernels write."""
    arguments = full(op).arguments(Inputs(torch.bfloat16))
    found = []
    for compiled in (False, True):
        given, wanted = leaves(arguments)

        def function(*values, given=given, wanted=wanted):
            return op.call(given | dict(zip(wanted, values, strict=True)), backend="triton")

        torch.compiler.reset()
        call = torch.compile(function, backend="aot_eager") if compiled else function
        found.append(gradients(call(*wanted.values()), wanted))
    assert all(map(torch.equal, *found))


# what each op keeps for its backward when every tensor of its fullest case needs a gradient, and
# what it does not keep although the reference reads it
KEPT = {
    "rmsnorm_residual": {"weight", "residual_out"},
    "gated_residual": {"x", "gate"},
    "modulate": {"x", "scale", "shift"},
    "gelu": {"input"},
    "silu_mul": {"gate", "up"},
}


@pytest.mark.parametrize("name", KEPT)
def test_only_what_the_gradient_reads_is_kept(name):
    op = registry()[name]
    given, _ = leaves(full(op).arguments(Inputs(torch.bfloat16)))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outputs = as_tuple(op.call(given))
    values = tensors(given) | dict(zip(op.outputs, outputs, strict=True))
    names = {n for n, t in values.items() if any(t.data_ptr() == k.data_ptr() for k in kept)}
    assert names == KEPT[name]


def test_a_rotation_keeps_its_tables_alone():
    x = torch.randn(2, 6, 3, 64, requires_grad=True)
    cos, sin = torch.randn(6, 64), torch.randn(6, 64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        apply_rope(x, cos, sin)
    assert [t.data_ptr() for t in kept] == [cos.data_ptr(), sin.data_ptr()]


@every_op([op for op in OPS if op.inplace])
def test_inplace_is_refused_where_autograd_records(op):
    arguments, _ = leaves(full(op).arguments(Inputs(torch.float32)))
    with pytest.raises(ValueError, match=f"^{op.name}: inplace=True cannot be recorded"):
        op.call(arguments, inplace=True)
