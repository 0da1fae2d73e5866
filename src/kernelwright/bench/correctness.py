"""What an implementation must show before it is timed: the right result, by its own kernel.

    ‖got - truth‖ / ‖truth‖  <=  that of eager + one rounding of the output

`truth` is the op's reference in float64. An exact mode must give the bits of its eager chain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..ops.composite import Composite, Part
from ..ops.op import Op
from ..profiling.categories import category
from .peers import given

# relative error of eager from which the case itself is taken to be wrong
WRONG = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


class Wrong(AssertionError):
    """An implementation that must not be timed; the message says why."""


class Truth:
    """The float64 result of one set of arguments, and eager's error against it."""

    def __init__(self, op: Op | Composite, arguments: Mapping[str, Any], eager: Any) -> None:
        self._part = _part(op, arguments)
        wide = {n: _double(v) for n, v in self._part(arguments).items()}
        way = given(op, op.reference)
        self._values = as_tuple(way.call(way.prepare(wide)))
        self.dtype = as_tuple(eager)[0].dtype
        self.eager_error = self.error(eager)
        if not self.eager_error < WRONG[self.dtype]:
            raise Wrong(f"eager itself has error {self.eager_error:.2e} against float64")

    def error(self, got: Any) -> float:
        """The largest relative error of the outputs."""
        outputs = as_tuple(self._part({"out": got})["out"])
        worst = 0.0
        for g, t in zip(outputs, self._values, strict=True):
            if g.shape != t.shape:
                raise Wrong(f"shape {list(g.shape)}, expected {list(t.shape)}")
            off = float((g.double() - t).norm() / t.norm().clamp_min(1e-300))
            worst = max(worst, off if off == off else float("inf"))
        return worst

    def hold(self, got: Any) -> float:
        """The error of `got`; raises Wrong if it is above eager's plus one rounding."""
        error = self.error(got)
        if error > self.eager_error + torch.finfo(self.dtype).eps / 2:
            raise Wrong(f"error {error:.2e} against float64, eager's is {self.eager_error:.2e}")
        return error


def same_bits(got: Any, expected: Any, chain: str) -> None:
    for g, e in zip(as_tuple(got), as_tuple(expected), strict=True):
        if not torch.equal(g, e):
            raise Wrong(f"not the bits of {chain}: {int((g != e).sum())} elements differ")


class _Calls(TorchFunctionMode):
    """Collects the names of the PyTorch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.add(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


def ran_a_kernel(call: Callable[[], Any]) -> None:
    """Raise Wrong if PyTorch did the arithmetic, so that the kernel did not run.

    A launch calls PyTorch only to allocate memory and to read addresses.
    """
    with _Calls() as calls:
        call()
    computed = sorted(n for n in calls.names if category(f"aten::{n}") not in ("copies", "other"))
    if computed:
        raise Wrong(f"fell back to PyTorch: {', '.join(computed)} ran instead of the kernel")


def as_tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def _double(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if floating else value


def _part(op: Op | Composite, arguments: Mapping[str, Any]) -> Part:
    """The part of arguments and result to compare: all, or what a Composite declares."""
    return op.part(arguments) if isinstance(op, Composite) else dict
