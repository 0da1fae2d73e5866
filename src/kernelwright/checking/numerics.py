"""The accuracy bar: a kernel's error against float64 is not above eager PyTorch's own.

    |got - truth| <= error of eager + one ulp of the output dtype at |truth|

`truth` is the reference in float64, `eager` the chain of PyTorch calls that the op replaces, in the
dtype under test. The error of eager is its largest in the tensor, absolute or in ulps: an error on
one element could as well have been on another of that size. The ulp is the rounding of the output:
a kernel that rounds once may give the other neighbour of the truth.

An op without an exact mode promises more in 16 bits: float32 inside, and one rounding at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.case import Case, Inputs

Tensors = Tensor | tuple[Tensor, ...]
# Half an ulp for the one rounding of a result, and what float32 leaves before it: in its functions,
# in ulps of the result, and in sums that cancel, as a part of the largest result
ONE_ROUNDING, IN_FLOAT32 = 0.5 + 2**-6, 2**-19
# The largest error of eager is a property of its chain. In 16 bits the rounding of the output
# dominates, and one draw of a case shows it; in float32 a few hundred elements of one draw show it
# only within a factor of two or three, so more draws are taken.
DRAWS = {torch.float32: 8}


@dataclass(frozen=True)
class Error:
    """The largest error of a tensor: `absolute`, and in `ulps` of elements of at least average
    size, since smaller ones may be what cancellation left of larger terms."""

    absolute: float = 0.0
    ulps: float = 0.0

    @staticmethod
    def of(values: Tensor, truth: Tensor) -> Error:
        error = (values.double() - truth).abs()
        finite = error.isfinite() & truth.isfinite()
        if not finite.any():
            return Error()
        error, truth = error[finite], truth[finite]
        large = truth.abs() >= truth.square().mean().sqrt()
        ulps = error[large] / ulp(truth[large], values.dtype)
        return Error(error.max().item(), ulps.max().item() if ulps.numel() else 0.0)

    def __or__(self, other: Error) -> Error:
        return Error(max(self.absolute, other.absolute), max(self.ulps, other.ulps))


def hold_case(
    op: Any,
    case: Case,
    dtype: torch.dtype,
    call: Callable[[dict[str, Any]], Tensors],
    device: str = "cpu",
) -> Tensors:
    """Check the result of `call` for the case's arguments against the bar, and return it."""
    arguments = case.arguments(Inputs(dtype, device))
    got = call(arguments)
    bars = eager_errors(op, case, dtype, device)
    as_good_as_eager(got, in_float64(op, arguments), in_eager(op, arguments), bars)
    return got


def as_good_as_eager(
    got: Tensors, truth: Tensors, eager: Tensors, known: tuple[Error, ...] | None = None
) -> None:
    """Raise an AssertionError that names the worst element if `got` fails the bar. `known` is the
    error of eager for each output, where it was measured over more draws than this one."""
    outputs = zip(as_tuple(got), as_tuple(truth), as_tuple(eager), strict=True)
    for number, (g, t, e) in enumerate(outputs):
        assert g.shape == t.shape, f"output {number} has shape {g.shape}, expected {t.shape}"
        g, t, e = g.detach(), t.detach(), e.detach().to(g.dtype)
        _hold(number, g, t, e, known[number] if known else Error())


def _hold(number: int, got: Tensor, truth: Tensor, eager: Tensor, known: Error) -> None:
    truth = _held(truth, got.dtype)
    assert torch.equal(got.isnan(), truth.isnan()), f"output {number}: NaN in other places"
    loss, last = Error.of(eager, truth) | known, ulp(truth, got.dtype)
    bar = (loss.ulps * last).clamp(min=loss.absolute) + last
    # equal infinities are right, though their difference is NaN
    same = (got.double() == truth) | truth.isnan()
    error = torch.where(same, 0.0, (got.double() - truth).abs())
    over = error - bar
    if over.numel() and over.max() > 0:
        at = int(over.argmax())
        values = (t.flatten()[at].item() for t in (got, truth, eager, error, bar))
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), got.shape))
        raise AssertionError(
            "output {} at {}: got {}, truth {}, eager {}, error {:.3e} over the bar {:.3e}; "
            "{} of {} elements are".format(
                number, where, *values, int((over > 0).sum()), got.numel()
            )
        )


def rounded_once(got: Tensors, truth: Tensors) -> None:
    """Raise an AssertionError that names the worst element if a result in 16 bits was rounded more
    than once, or not computed in float32."""
    for number, (g, t) in enumerate(zip(as_tuple(got), as_tuple(truth), strict=True)):
        if g.dtype not in (torch.float16, torch.bfloat16) or not g.numel():
            continue
        t = _held(t.detach(), g.dtype)
        last, values = ulp(t, g.dtype), g.detach().double()
        known = t.isfinite() & values.isfinite()
        error = torch.where(known, (values - t).abs(), 0.0)
        largest = torch.where(known, t.abs(), 0.0).max()
        over = error - (ONE_ROUNDING * last + IN_FLOAT32 * largest)
        if over.max() > 0:
            at = int(over.argmax())
            value, right, apart, off = (x.flatten()[at].item() for x in (g, t, last, error))
            raise AssertionError(
                f"output {number}: got {value}, truth {right}, off by {off / apart:.2f} ulps: "
                "without an exact mode an op computes in float32 and rounds once, at the end"
            )


@functools.cache
def eager_errors(op: Any, case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[Error, ...]:
    """The error of eager for each output of a case."""

    def draw(seed: int) -> tuple[Tensors, Tensors]:
        arguments = case.arguments(Inputs(dtype, device, seed))
        return in_eager(op, arguments), in_float64(op, arguments)

    return errors_over_draws(draw, dtype)


def errors_over_draws(
    draw: Callable[[int], tuple[Tensors, Tensors]], dtype: torch.dtype
) -> tuple[Error, ...]:
    """The largest errors over draws; `draw(seed)` gives (values, truth)."""
    worst: tuple[Error, ...] = ()
    for seed in range(DRAWS.get(dtype, 1)):
        both = zip(*map(as_tuple, draw(seed)), strict=True)
        errors = tuple(Error.of(v.to(dtype), _held(t, dtype)) for v, t in both)
        worst = tuple(a | b for a, b in zip(errors, worst or errors, strict=True))
    return worst


def _held(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """The truth, infinite where it overflows the dtype."""
    rounded = truth.to(dtype).double()
    return torch.where(rounded.isinf(), rounded, truth)


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of `dtype` in the binade of |values|, in float64.

    |v| in [2^(e-1), 2^e) has neighbours eps * 2^(e-1) apart; subnormal numbers are as far apart as
    the smallest normal ones. 0 at infinity.
    """
    info = torch.finfo(dtype)
    least = info.eps * info.smallest_normal
    _, exponent = torch.frexp(values.double())
    apart = torch.ldexp(torch.full_like(values, info.eps, dtype=torch.float64), exponent - 1)
    apart = torch.where(values == 0, least, apart.clamp(min=least))
    return torch.where(values.isfinite(), apart, 0.0)


def in_float64(op: Any, arguments: Mapping[str, Any]) -> Tensors:
    """The truth: the op's reference on the same values in float64."""
    return run(op, op.reference, {n: widened(a) for n, a in arguments.items()})


def in_eager(op: Any, arguments: Mapping[str, Any]) -> Tensors:
    """The result of eager PyTorch: the op's first eager chain, or the reference without one."""
    return run(op, next(iter(op.exact.values()), op.reference), arguments)


def run(op: Any, function: Callable[..., Tensors], arguments: Mapping[str, Any]) -> Tensors:
    """A reference or an eager chain on arguments given by name."""
    if hasattr(op, "arguments"):
        return function(*(arguments[n] for n in op.arguments))
    return function(**arguments)


def widened(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().double() if floating else value


def as_tuple(values: Tensors) -> tuple[Tensor, ...]:
    return values if isinstance(values, tuple) else (values,)
