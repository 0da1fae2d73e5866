"""The accuracy bar for gradients: their error against float64 is not above eager PyTorch's own."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.case import Case, Inputs
from ..ops.op import registry
from .numerics import Error, as_good_as_eager, as_tuple, errors_over_draws, in_eager, run, widened
from .op_cases import tensors


def leaves(
    arguments: Mapping[str, Any], names: Collection[str] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments as fresh leaves, and those of them that are to get a gradient."""
    given = {n: t.detach().clone() for n, t in tensors(arguments).items() if t.is_floating_point()}
    wanted = {n: t.requires_grad_() for n, t in given.items() if names is None or n in names}
    return {**arguments, **given}, wanted


def seeds(outputs: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Incoming gradients, the same values whatever computed the outputs."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(o.shape, generator=generator).to(dtype or o.dtype).to(o.device) for o in outputs
    ]


def gradients(
    outputs: Any, wanted: Mapping[str, Tensor], incoming: list[Tensor] | None = None, **how: Any
) -> tuple[Tensor, ...]:
    outputs = as_tuple(outputs)
    return torch.autograd.grad(outputs, list(wanted.values()), incoming or seeds(outputs), **how)


def hold_gradients(
    op: Any, case: Case, dtype: torch.dtype, backend: str | None = None, device: str = "cpu"
) -> None:
    """Check the gradients of every tensor of a case against the bar."""
    given, wanted = leaves(case.arguments(Inputs(dtype, device)))
    got = gradients(op.call(given, backend=backend), wanted)
    eager, truth = _compared(op, case, dtype, device, 0)
    as_good_as_eager(got, truth, eager, _errors(op.name, case, dtype, device))


@functools.cache
def _errors(name: str, case: Case, dtype: torch.dtype, device: str) -> tuple[Error, ...]:
    op = registry()[name]
    return errors_over_draws(lambda seed: _compared(op, case, dtype, device, seed), dtype)


def _compared(
    op: Any, case: Case, dtype: torch.dtype, device: str, seed: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The gradients of eager PyTorch, and of the reference in float64."""
    arguments = case.arguments(Inputs(dtype, device, seed=seed))
    given, wanted = leaves({n: widened(a) for n, a in arguments.items()})
    outputs = as_tuple(run(op, op.reference, given))
    incoming = seeds(outputs, dtype)
    truth = gradients(outputs, wanted, [g.double() for g in incoming])
    given, wanted = leaves(arguments)
    outputs = as_tuple(in_eager(op, given))
    # a chain may promote its output; its gradient then comes in that dtype
    eager = gradients(
        outputs, wanted, [g.to(o.dtype) for g, o in zip(incoming, outputs, strict=True)]
    )
    return eager, truth
