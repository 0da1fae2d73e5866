"""Gradients of torch.ops.kernelwright.<name>, and its behaviour under torch.func and tangents.

The gradient is that of the reference, recomputed in float32: statistics and weight gradients
accumulate in float32, no saved tensor is overwritten, and a call without gradients pays nothing.
The backward is an op of its own, so torch.compile sees one node. For a gradient of the gradient
(create_graph=True) the reference runs where autograd records it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.torch_internals import (
    after_autograd,
    any_requires_grad,
    below_autograd,
    is_batched_gradient,
    schema_of,
)
from . import library, selection
from .op_protocol import DeclaredOp
from .transforms import transformed

Function = Callable[..., Any]


def record(op: DeclaredOp) -> None:
    """Register an op's gradient, and the transforms of both its node and its unrecorded node."""

    def steps(*values: Any) -> Any:
        *args, exact, backend = values
        return op.in_steps(tuple(args), exact or None, backend or selection.current.get())

    arguments = library.split(op.schema)[0]
    recompute(op.library_op, op.name, arguments, op.reference, steps)
    _transformable(op.unrecorded_op, f"{op.name}_unrecorded", steps, None)


def recompute(
    defined: Any,
    name: str,
    arguments: list[str],
    function: Function,
    steps: Function,
    twice: Function | None = None,
) -> None:
    """Give torch.ops.kernelwright.<name> the gradient of `function`, recomputed in the backward.

    `arguments` are the schema's arguments that `function` takes; `steps` takes all arguments and
    computes the op with PyTorch ops; `twice` replaces `function` where the gradient itself is
    differentiated.
    """
    plain = ", ".join(a.split("=")[0] for a in arguments)
    count = len(arguments)
    differentiated_again = twice or function

    def run(grads: list[Tensor], *values: Any) -> list[Tensor]:
        *args, wanted = values
        leaves = [
            a.detach().requires_grad_() if w else a for a, w in zip(args, wanted, strict=True)
        ]
        with torch.enable_grad():
            outs = function(*leaves)
        sources = [a for a, w in zip(leaves, wanted, strict=True) if w]
        got = _derived(outs, sources, grads)
        taken = {g.untyped_storage().data_ptr() for g in grads}
        return [_own(g, s, taken) for g, s in zip(got, sources, strict=True)]

    def fake(grads: list[Tensor], *values: Any) -> list[Tensor]:
        *args, wanted = values
        return [torch.empty_like(a) for a, w in zip(args, wanted, strict=True) if w]

    schema = f"(Tensor[] grads, {plain}, bool[] wanted) -> Tensor[]"
    again = library.define(f"{name}_backward", schema, run, fake)

    def differentiable(
        grads: Sequence[Tensor], args: list[Any], wanted: list[bool]
    ) -> list[Tensor]:
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # views make new leaves: if one argument was computed from another, its path is not
            # counted twice
            parts = [a.view_as(a) if w else a for a, w in zip(args, wanted, strict=True)]
            outs = differentiated_again(*parts)
        sources = [a for a, w in zip(parts, wanted, strict=True) if w]
        got = _derived(outs, sources, grads, create_graph=create_graph)
        return [torch.zeros_like(s) if g is None else g for g, s in zip(got, sources, strict=True)]

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *values: Any) -> Any:
            ctx.save_for_backward(*(a for a in values[:count] if isinstance(a, Tensor)))
            ctx.values = [None if isinstance(a, Tensor) else (a,) for a in values[:count]]
            ctx.hidden = len(values) - count
            return _below(defined, keyset, values)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            saved = iter(ctx.saved_tensors)
            args = [next(saved) if v is None else v[0] for v in ctx.values]
            wanted = [bool(n) for n in ctx.needs_input_grad[1 : count + 1]]
            if (
                torch.is_grad_enabled()
                or transformed((*grads, *args))
                or any(map(is_batched_gradient, grads))
            ):
                got = iter(differentiable(grads, args, wanted))
            else:
                got = iter(again(list(grads), *args, wanted))
            return (None, *(next(got) if w else None for w in wanted), *[None] * ctx.hidden)

    Recorded.__name__ = Recorded.__qualname__ = f"{name}_recorded"
    _transformable(defined, name, steps, Recorded)


def _transformable(
    defined: Any, name: str, steps: Function, recorded: type[torch.autograd.Function] | None
) -> None:
    """Run `steps` where torch.func or a tangent transforms a call; else record its gradient."""
    defaults = [a.default_value for a in schema_of(defined).arguments]

    def call(keyset: Any, *values: Any) -> Any:
        # the dispatcher drops trailing arguments that hold their default
        values = (*values, *defaults[len(values) :])
        if transformed(values):
            return steps(*values)
        if recorded and torch.is_grad_enabled() and any_requires_grad(*values):
            return recorded.apply(keyset, *values)
        return _below(defined, keyset, values)

    def batched(*values: Any) -> Any:
        return steps(*values, *defaults[len(values) :])

    library.implement(name, call, batched)


def _below(defined: Any, keyset: Any, values: tuple[Any, ...]) -> Any:
    """Redispatch below autograd."""
    with below_autograd():
        return defined.redispatch(keyset & after_autograd, *values)


def _derived(
    outs: Any, sources: list[Tensor], grads: Sequence[Tensor], **how: Any
) -> Sequence[Tensor | None]:
    outs = outs if isinstance(outs, tuple) else (outs,)
    # an output need not depend on any source: a residual sum does not depend on the weight
    reached = [(o, g) for o, g in zip(outs, grads, strict=True) if o.requires_grad]
    ends, incoming = [o for o, _ in reached], [g for _, g in reached]
    return torch.autograd.grad(ends, sources, incoming, allow_unused=True, **how)


def _own(grad: Tensor | None, source: Tensor, taken: set[int]) -> Tensor:
    """The gradient in memory of its own, with the strides that the fake kernel promised."""
    like = torch.empty_like(source)
    if grad is None:
        return like.zero_()
    pointer = grad.untyped_storage().data_ptr()
    if pointer in taken or grad.stride() != like.stride() or grad.dtype != like.dtype:
        return like.copy_(grad)
    taken.add(pointer)
    return grad
