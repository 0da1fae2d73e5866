"""What every op promises, as checks of one op: for `kernelwright check`, and for the tests of
packages that add ops."""

from __future__ import annotations

import doctest
import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from .. import backends, ops
from ..catalog import public
from ..ops.case import Case, Inputs
from ..ops.op import Composite, Op
from .conditions import poisoned_memory, rounding_interpreter
from .emulator import Emulator, WhenAsked, emulated
from .gradients import hold_gradients, seeds
from .numerics import (
    as_good_as_eager,
    as_tuple,
    eager_errors,
    hold_case,
    in_eager,
    in_float64,
    rounded_once,
    run,
    widened,
)
from .op_cases import DTYPES, filled, full, small, tensors
from .planned_kernels import kernels

Checked = Op | Composite
# gradcheck's step is 1e-6: its differences lose digits on values much larger than one
STEEP = 8.0


@dataclass(frozen=True)
class Promise:
    """One promise of an op; `hold` raises if it is broken."""

    name: str
    hold: Callable[[], None]

    def broken(self) -> str | None:
        """Why it is broken, in one line, or None."""
        try:
            with ExitStack() as stack:
                stack.enter_context(poisoned_memory())
                stack.enter_context(rounding_interpreter())
                stack.enter_context(warnings.catch_warnings())
                # numpy warns of exp(89), an op of an exact call that falls back to eager;
                # `exact_kernel` fails if all calls do
                warnings.simplefilter("ignore")
                self.hold()
        except Exception as error:
            said = str(error).strip().splitlines()
            first = said[0] if said else ""
            return (
                first if isinstance(error, AssertionError) else f"{type(error).__name__}: {first}"
            )
        return None


def kernels_here(op: Checked, device: str) -> list[str]:
    """The backends of this op whose kernels can run on the device, interpreted or not."""
    at = torch.device(device)
    return [
        b
        for b in op.backends
        if b in ("triton", "cuda") and backends.problem(b, at, torch.float32) is None
    ]


def promises(
    op: Checked,
    device: str = "cpu",
    only: Collection[str] = (),
    emulator: Emulator | WhenAsked | None = None,
) -> Iterator[Promise]:
    """The promises of the op on this device; `only` those of these backends. With an emulator its
    CUDA kernels run on the CPU."""

    def promise(name: str, hold: Callable[..., None], *args: Any) -> Promise:
        return Promise(name, functools.partial(hold, op, *args))

    running = [b for b in kernels_here(op, device) if not only or b in only]
    in_cuda = "cuda" in op.backends and (not only or "cuda" in only)
    for case in small(op):
        for chain in op.exact:
            yield promise(f"eager {chain}, {case.name}", same_function, chain, case, device)
        for dtype in DTYPES:
            named = f"{case.name}, {str(dtype).removeprefix('torch.')}"
            for backend in ("torch", *running):
                if _runs(backend, device, dtype):
                    yield promise(f"{backend}: {named}", close, case, dtype, backend, device)
            for chain in op.exact:
                yield promise(f"exact {chain}: {named}", exact_bits, case, dtype, chain, device)
            if emulator is not None and in_cuda and isinstance(op, Op):
                for exact in (None, *op.exact):
                    how = f", exact {exact}" if exact else ""
                    name = f"cuda emulated{how}: {named}"
                    yield promise(name, close_emulated, case, dtype, exact, emulator)
    for backend in running:
        yield promise(f"{backend}: a bad row stays in its row", bad_row, backend, device)
    if isinstance(op, Op):
        for chain in op.exact if in_cuda else ():
            yield promise(f"exact {chain}: a kernel keeps its bits", exact_kernel, chain)
        for backend in ("torch", *running):
            yield promise(f"{backend}: out= is written", out_written, backend, device)
        for case, dtype in itertools.product(filled(op), DTYPES):
            if op.backward is not None and "triton" in running and _runs("triton", device, dtype):
                named = f"{case.name}, {str(dtype).removeprefix('torch.')}"
                yield promise(f"triton: gradients, {named}", close_gradients, case, dtype, device)
        yield promise("torch.library: schema and fake kernel", library_op, device)
        yield promise("torch.compile: one graph, the same bits, all cases", compiled, device)
    for case in filled(op):
        yield promise(f"the gradient is the derivative, {case.name}", gradient, case, device)
    yield promise("a wrong tensor is named", wrong_tensor, device)
    if device == "cpu":
        yield promise("the example in its documentation runs", example)


def _runs(backend: str, device: str, dtype: torch.dtype) -> bool:
    return backend == "torch" or backends.problem(backend, torch.device(device), dtype) is None


def close(op: Checked, case: Case, dtype: torch.dtype, backend: str, device: str) -> None:
    """As close to float64 as eager PyTorch is; without an exact mode, rounded once."""
    got = hold_case(op, case, dtype, lambda a: op.call(a, backend=backend), device)
    if _rounds_once(op):
        rounded_once(got, in_float64(op, case.arguments(Inputs(dtype, device))))


def _rounds_once(op: Checked) -> bool:
    return isinstance(op, Op) and not op.exact


def close_emulated(
    op: Op, case: Case, dtype: torch.dtype, exact: str | None, emulator: Emulator | WhenAsked
) -> None:
    """The CUDA kernel, emulated, is as close to float64 as eager PyTorch is. An exact mode is held
    to this too: its bits are those of the functions of a GPU."""
    arguments = case.arguments(Inputs(dtype))
    got = emulated(emulator, op, arguments, exact)
    if got is not None:
        chain = op.exact[exact] if exact else next(iter(op.exact.values()), op.reference)
        known, truth = eager_errors(op, case, dtype), in_float64(op, arguments)
        as_good_as_eager(got, truth, run(op, chain, arguments), known)
        if _rounds_once(op):
            rounded_once(got, truth)


def close_gradients(op: Op, case: Case, dtype: torch.dtype, device: str) -> None:
    """The gradients of the kernels are as close to float64 as those of eager PyTorch."""
    hold_gradients(op, case, dtype, "triton", device)


def same_function(op: Checked, chain: str, case: Case, device: str) -> None:
    """The reference and an eager chain compute the same. The bound: in float32 a chain rounds a few
    times, on values as large as its arguments and its result."""
    arguments = case.arguments(Inputs(torch.float32, device))
    largest = max(map(magnitude, tensors(arguments).values()))
    eager = as_tuple(run(op, op.exact[chain], arguments))
    for e, truth in zip(eager, as_tuple(in_float64(op, arguments)), strict=True):
        bound = 16 * 2**-24 * largest * magnitude(truth)
        torch.testing.assert_close(e.double(), truth, rtol=0, atol=bound)


def magnitude(t: Tensor) -> float:
    """The largest finite |t|, at least 1."""
    values = t.double().abs()
    return max(1.0, values[values.isfinite()].max().item()) if t.numel() else 1.0


def exact_bits(op: Checked, case: Case, dtype: torch.dtype, chain: str, device: str) -> None:
    """An exact call gives the bits of the eager chain; not checked where eager promotes dtypes."""
    arguments = case.arguments(Inputs(dtype, device))
    eager = as_tuple(run(op, op.exact[chain], arguments))
    if any(e.dtype != dtype for e in eager):
        return
    got = as_tuple(_exactly(op, arguments, chain, device))
    differ = sum(int((g != e).sum()) for g, e in zip(got, eager, strict=True))
    assert all(map(torch.equal, got, eager)), f"{differ} elements are not those of eager {chain}"


def _exactly(op: Checked, arguments: dict[str, Any], chain: str, device: str) -> Any:
    """An exact call by the CUDA kernel where there is one, else by the eager chain itself; that
    some case has a kernel is another promise, `exact_kernel`."""
    if isinstance(op, Op) and "cuda" in kernels_here(op, device):
        try:
            return op.call(arguments, exact=chain, backend="cuda")
        except ValueError as error:
            if not isinstance(error.__cause__, backends.Unsupported):
                raise
    return op.call(arguments, exact=chain)


def exact_kernel(op: Op, chain: str) -> None:
    """An exact call has a kernel for at least one case, and not only the eager chain."""
    arch = "sm_90"
    found = kernels("cuda", arch, everything=True, ops=[op])
    assert any(k.call.exact == chain for k in found), f"no case has a kernel on {arch}"


def bad_row(op: Checked, backend: str, device: str) -> None:
    """A row of NaN or infinity changes itself and no other."""
    case = full(op)
    clean = case.arguments(Inputs(torch.float32, device))
    expected = as_tuple(op.call(clean, backend=backend))
    known = eager_errors(op, case, torch.float32, device)
    for bad in (float("nan"), float("inf")):
        for name in rowwise(clean, expected[0]):
            arguments = clean | {name: clean[name].clone()}
            row = (0,) * min(2, clean[name].ndim - 1)
            arguments[name][row] = bad
            got = as_tuple(op.call(arguments, backend=backend))
            as_good_as_eager(got, in_float64(op, arguments), in_eager(op, arguments), known)
            changed = False
            for g, e in zip(got, expected, strict=True):
                others = torch.ones(g.shape, dtype=torch.bool, device=device)
                others[row] = False
                assert torch.equal(g[others], e[others]), f"{name}: another row changed"
                changed |= not torch.equal(g[row], e[row])
            assert changed, f"{name}: the row itself did not change"


def rowwise(arguments: dict[str, Any], out: Tensor) -> list[str]:
    """Tensor arguments that have a row for each row of the output."""
    return [
        name
        for name, t in tensors(arguments).items()
        if t.ndim > 1 and t.shape[:-1] == out.shape[:-1]
    ]


def out_written(op: Op, backend: str, device: str) -> None:
    """Tensors passed as out= are filled and returned, also with gaps between their rows."""
    if op.inplace:
        return
    arguments = full(op).arguments(Inputs(torch.float32, device))
    expected = as_tuple(op.call(arguments, backend=backend))
    outputs = tuple(e.new_empty((*e.shape[:-1], e.shape[-1] + 8))[..., 4:-4] for e in expected)
    out = outputs if len(outputs) > 1 else outputs[0]
    got = as_tuple(op.call(arguments, out=out, backend=backend))
    for g, o, e in zip(got, outputs, expected, strict=True):
        assert g is o, "another tensor than out= came back"
        assert torch.equal(o, e), "out= holds another result"


def library_op(op: Op, device: str) -> None:
    """torch.library.opcheck: schema, autograd registration, fake kernel, AOT dispatch."""
    arguments = full(op).arguments(Inputs(torch.float32, device))
    for t in tensors(arguments).values():
        if t.is_floating_point() and t.is_leaf:
            t.requires_grad_()
    library: Any = op.library_op
    torch.library.opcheck(library, tuple(arguments[n] for n in op.arguments))


def compiled(op: Op, device: str) -> None:
    """torch.compile(fullgraph=True) gives the bits of eager."""
    function = public(op)
    for case in small(op):
        arguments = case.arguments(Inputs(torch.bfloat16, device))
        expected = as_tuple(function(**arguments))
        torch.compiler.reset()
        try:
            traced = torch.compile(function, fullgraph=True, backend="aot_eager")
            got = as_tuple(traced(**arguments))
        finally:
            torch.compiler.reset()
        same = all(map(torch.equal, got, expected))
        assert same, f"{case.name}: other bits than without torch.compile"


def gradient(op: Checked, case: Case, device: str) -> None:
    """gradcheck: the gradient equals finite differences in float64. Cases of values so large that a
    step of the differences vanishes beside them are drawn smaller."""
    arguments = case.arguments(Inputs(torch.float32, device))
    largest = max(map(magnitude, tensors(arguments).values()))
    if largest > STEEP:
        arguments = case.arguments(Inputs(torch.float32, device, scale=STEEP / largest))
    wide = {n: widened(t).clone() for n, t in tensors(arguments).items() if t.is_floating_point()}
    leaves = {n: t.requires_grad_() for n, t in wide.items()}

    def function(*values: Tensor) -> Any:
        return op.call(arguments | dict(zip(leaves, values, strict=True)))

    if isinstance(op, Op) and op.backward is not None:
        _as_autograd(op, arguments | leaves, leaves)
    try:
        gradcheck(function, tuple(leaves.values()), fast_mode=True)
    except GradcheckError as error:
        said = str(error).splitlines()[0].rstrip(",")
        raise AssertionError(
            f"{said} (finite differences; at a kink, such as relu's zero, there is no derivative: "
            "draw the values of the case elsewhere)"
        ) from None


def _as_autograd(op: Op, arguments: dict[str, Any], leaves: dict[str, Tensor]) -> None:
    """The formula of a declared backward gives the gradients of the reference in float64."""
    outs, wanted = (as_tuple(f(arguments)) for f in (op.call, lambda a: run(op, op.reference, a)))
    incoming = seeds(outs)
    got = torch.autograd.grad(outs, list(leaves.values()), incoming, allow_unused=True)
    right = torch.autograd.grad(wanted, list(leaves.values()), incoming, allow_unused=True)
    for name, g, r in zip(leaves, got, right, strict=True):
        r = torch.zeros_like(leaves[name]) if r is None else r
        g = torch.zeros_like(r) if g is None else g
        off = (g - r).abs().max().item() if g.numel() else 0.0
        assert off <= 1e-9 * max(1.0, r.abs().max().item() if r.numel() else 1.0), (
            f"backward.py: `formula` is not the derivative of reference.py: the gradient of {name} "
            f"is off by {off:.1e}"
        )


def wrong_tensor(op: Checked, device: str) -> None:
    """An integer tensor or a number raises an error that names the op and the argument."""
    arguments = full(op).arguments(Inputs(torch.float32, device))
    for name, t in tensors(arguments).items():
        for wrong in (t.to(torch.int32), 3, t.flatten()[0]):
            try:
                op.call(arguments | {name: wrong})
            except (TypeError, ValueError) as error:
                said = str(error)
                assert said.startswith(f"{op.name}: "), f"the error does not name the op: {said}"
                assert name in said, f"the error does not name {name}: {said}"
            else:
                raise AssertionError(f"{name} was accepted as {getattr(wrong, 'dtype', wrong)}")


def example(op: Checked) -> None:
    """The docstring has an example, and it prints what it says."""
    function = public(op)
    given = {"torch": torch, **vars(ops), op.name: function}
    (test,) = doctest.DocTestFinder(recurse=False).find(function, op.name, globs=given)
    assert test.examples, f"{op.name} has no example in its documentation"
    said: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert results.failed == 0, " ".join("".join(said).split())
