"""What a way must show before it is timed: the right answer, computed by its own kernel.

    ‖got - truth‖ / ‖truth‖  <=  the same of eager + one rounding of the output

`truth` is the op's reference in float64. A way that is exact must have the bits of its chain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..ops.op import Composite, Op
from ..profiling.categories import category
from .peers import given

# relative error that no right answer of these dtypes comes near: eager is held to it
WRONG = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
# scores of attention in float64 up to here; of larger ones a part is held
SCORES = 1 << 28


class Wrong(AssertionError):
    """A way whose time would mean nothing, and why."""


class Truth:
    """One set of arguments, its result in float64 and how far eager is from that."""

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
        """The error of `got`; a `Wrong` that says so if it is above the bar."""
        error = self.error(got)
        if error > self.eager_error + torch.finfo(self.dtype).eps / 2:
            raise Wrong(f"error {error:.2e} against float64, eager's is {self.eager_error:.2e}")
        return error


def same_bits(got: Any, expected: Any, chain: str) -> None:
    for g, e in zip(as_tuple(got), as_tuple(expected), strict=True):
        if not torch.equal(g, e):
            raise Wrong(f"not the bits of {chain}: {int((g != e).sum())} elements differ")


class _Calls(TorchFunctionMode):
    """The names of PyTorch's functions that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.add(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


def ran_a_kernel(call: Callable[[], Any]) -> None:
    """Raise a `Wrong` if PyTorch did the arithmetic: then some kernel was fallen back from.

    A launch calls nothing of PyTorch but what makes memory and tells of addresses.
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


def _part(op: Op | Composite, arguments: Mapping[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """What of the arguments and of the result is held: all, or of an attention whose scores would
    not fit in float64, the heads of the first group."""
    if op.name != "attention":
        return dict
    query, key = arguments["query"], arguments["key"]
    scores = (*query.shape[:3], key.shape[2])
    if torch.Size(scores).numel() <= SCORES:
        return dict
    heads = query.shape[1] // key.shape[1]

    def part(values: Mapping[str, Any]) -> dict[str, Any]:
        cut = dict(values)
        for name, value in values.items():
            if name in ("query", "out"):
                cut[name] = value[:1, :heads]
            elif name in ("key", "value"):
                cut[name] = value[:1, :1]
            elif name == "mask" and value is not None:
                cut[name] = torch.broadcast_to(value, scores)[:1, :heads]
        return cut

    return part
