"""How an op computes its gradients: a formula in PyTorch, and Triton kernels for the GPU.

An op declares `backward=` with an object of this protocol. `gradient.py` registers it as
torch.ops.kernelwright.<name>_backward; an op without one runs its reference again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import or_
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import backends
from ..backends import Launch, Target, Unsupported
from ..backends.user_warnings import warn
from . import selection
from .plan import Call, on_device
from .plan_cache import PlanCache, remember
from .rows import has_gaps, with_dense_rows

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """One launch of a backward: `plan` describes it for tensors and numbers given by name."""

    plan: Callable[[Call], Launch]
    values: dict[str, Any]


class Backward(Protocol):
    """Tensors go by the names of the op's arguments and outputs. `grads` are the gradients of the
    outputs, None where the loss does not depend on one. `values` are the arguments and outputs,
    None where `reads` leaves one out. `wanted` are the arguments to compute a gradient of."""

    def reads(self, values: Values, wanted: Collection[str]) -> tuple[str, ...]:
        """The tensors to keep for the backward; more than these is memory for nothing."""

    def reached(self, grads: Values, wanted: Collection[str]) -> list[str]:
        """Those of `wanted` that the given gradients of the outputs reach."""

    def shared(self, values: Values) -> Mapping[str, str]:
        """Arguments whose gradient is that of another argument: residual and x of their sum."""

    def allocate(self, grads: Values, values: Values, wanted: Collection[str]) -> dict[str, Tensor]:
        """Memory for the gradients of `wanted`."""

    def formula(self, grads: Values, values: Values, wanted: Collection[str]) -> dict[str, Tensor]:
        """The gradients as PyTorch ops, which autograd can record."""

    def triton(self, grads: Values, values: Values, outs: dict[str, Tensor]) -> Iterator[Step]:
        """The launches that write `outs`; raises Unsupported before the first if none can."""


def compute(
    name: str,
    backward: Backward,
    grads: Values,
    values: Values,
    wanted: Collection[str],
    backend: str,
) -> dict[str, Tensor]:
    """The gradients of `wanted`, each in memory of its own."""
    outs = backward.allocate(grads, values, wanted)
    if _by_kernels(name, backward, grads, values, outs, backend):
        return outs
    found = backward.formula(grads, values, wanted)
    taken = {t.untyped_storage().data_ptr() for t in grads.values() if t is not None}
    return {n: own(found[n], like, taken) for n, like in outs.items()}


def _by_kernels(
    name: str,
    backward: Backward,
    grads: Values,
    values: Values,
    outs: dict[str, Tensor],
    backend: str,
) -> bool:
    """Run the Triton kernels, or return False where the formula has to run."""
    first = next(iter(outs.values()))
    # a forward of CUDA C++ or from the Hub has no backward of its own kind
    named = backend in ("torch", "triton")
    asked = backend if named else "auto"
    if (
        selection.choose(name, ("triton",), first.device, first.dtype, None, asked).backend
        == "torch"
    ):
        return False
    if not all(o.numel() for o in outs.values()):
        return False  # a sum over no rows is zero, which the formula knows
    # kernels read and write rows along the last dimension
    dense = dict(zip(grads, with_dense_rows(grads.values()), strict=True))
    given = dict(zip(values, with_dense_rows(values.values()), strict=True))
    written = {n: _with_rows(t) for n, t in outs.items()}
    try:
        for step in backward.triton(dense, given, written):
            launch(name, step)
    except Unsupported as no:
        if named:
            raise ValueError(f"{name}: backend {backend!r} cannot run this: {no}") from no
        warn(f"{name}: {no}; running the formula in PyTorch instead")
        return False
    for n, t in written.items():
        if t is not outs[n]:
            outs[n].copy_(t)
    return True


def _with_rows(t: Tensor) -> Tensor:
    """Memory of this size that has no gaps in its rows; of this tensor, if that has none."""
    return torch.empty(t.shape, dtype=t.dtype, device=t.device) if has_gaps(t) else t


_launches: PlanCache[tuple[Callable[[Any], None], list[str]]] = {}


def launch(name: str, step: Step) -> None:
    """Launch a step; a kernel is planned and built once per signature."""
    present = [v for v in step.values.values() if isinstance(v, Tensor)]
    device = present[0].device
    on_gpu = device.type == "cuda"
    bits = functools.reduce(or_, map(Tensor.data_ptr, present)) if on_gpu else 16
    alignment = min(16, bits & -bits) if bits else 16
    key = (step.plan, alignment, *(map(_signature, step.values.values())))
    found = _launches.get(key)
    if found is None:
        call = Call(step.values, op=name, exact=None, target=Target.of(device), alignment=alignment)
        planned = step.plan(call)
        pointers = [n for n in planned.pointers if n and step.values[n] is not None]
        loaded = on_device(device, backends.load(planned, step.values, device, name))
        found = remember(_launches, key, (loaded, pointers))
    loaded, pointers = found
    tensors = [step.values[n] for n in pointers]
    loaded([t.data_ptr() for t in tensors] if on_gpu else tensors)


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value


def own(grad: Tensor | None, like: Tensor, taken: set[int]) -> Tensor:
    """The gradient in memory of its own, with the strides that the fake kernel promised."""
    if grad is None:
        return like.zero_()
    pointer = grad.untyped_storage().data_ptr()
    if pointer in taken or grad.stride() != like.stride() or grad.dtype != like.dtype:
        return like.copy_(grad)
    taken.add(pointer)
    return grad


def empty_rows(*candidates: Any) -> Tensor:
    """Memory like the first tensor that is there."""
    return torch.empty_like(next(t for t in candidates if t is not None))
