"""Gradients of torch.ops.kernelwright.<name>, and its behaviour under torch.func and tangents.

An op that declares `backward=` has kernels and a formula for its gradients. The gradient of another
op is that of the reference, recomputed in float32. In both, statistics and weight gradients
accumulate in float32, no saved tensor is overwritten, and a call without gradients pays nothing.
The backward is an op of its own, so torch.compile sees one node. For a gradient of the gradient
(create_graph=True) the formula, or the reference, runs where autograd records it.
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
from . import backward, library, selection
from .backward import Backward
from .op_protocol import DeclaredOp
from .transforms import transformed

Function = Callable[..., Any]


def record(op: DeclaredOp) -> None:
    """Register an op's gradient, and the transforms of both its node and its unrecorded node."""

    def steps(*values: Any) -> Any:
        *args, exact, backend = values
        return op.in_steps(tuple(args), exact or None, backend or selection.current.get())

    if op.writes:
        _transformable(op.library_op, op.name, steps, _refused(op.name))
    elif op.backward is None:
        recompute(op.library_op, op.name, library.split(op.schema)[0], op.reference, steps)
    else:
        _transformable(op.library_op, op.name, steps, _recorded(op, op.backward))
    _transformable(op.unrecorded_op, f"{op.name}_unrecorded", steps, None)


def _refused(name: str) -> type[torch.autograd.Function]:
    """The autograd function of an op that writes to its arguments: an error."""

    class Refused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *values: Any) -> Any:
            raise ValueError(
                f"{name}: it writes to its arguments, which cannot be recorded for autograd; "
                f"call it under torch.no_grad()"
            )

    return Refused


def _recorded(op: DeclaredOp, declared: Backward) -> type[torch.autograd.Function]:
    """The autograd function of an op that declares its backward, and <name>_backward with it."""
    kinds = library.arguments(op.schema)
    tensors = [n for n, kind in kinds if kind.startswith("Tensor")]
    plain = [a.split("=")[0] for a in library.split(op.schema)[0] if not a.startswith("Tensor")]
    plain_names = [n for n, kind in kinds if not kind.startswith("Tensor")]
    readable = (*tensors, *op.outputs)
    count = len(kinds)

    def named(
        grads: Sequence[Tensor | None], values: Sequence[Tensor | None], rest: Sequence[Any]
    ) -> tuple[Any, ...]:
        *numbers, wanted, backend = rest
        given = dict(zip(readable, values, strict=True))
        given |= dict(zip(plain_names, numbers, strict=True))
        chosen = [n for n, w in zip(tensors, wanted, strict=True) if w]
        return dict(zip(op.outputs, grads, strict=True)), given, chosen, backend

    def run(grads: list[Tensor | None], values: list[Tensor | None], *rest: Any) -> list[Tensor]:
        by_output, given, chosen, backend = named(grads, values, rest)
        found = backward.compute(op.name, declared, by_output, given, chosen, backend)
        return [found[n] for n in chosen]

    def fake(grads: list[Tensor | None], values: list[Tensor | None], *rest: Any) -> list[Tensor]:
        by_output, given, chosen, _ = named(grads, values, rest)
        found = declared.allocate(by_output, given, chosen)
        return [found[n] for n in chosen]

    parts = ["Tensor?[] grads", "Tensor?[] values", *plain, "bool[] wanted", "str backend"]
    node = library.define(f"{op.name}_backward", f"({', '.join(parts)}) -> Tensor[]", run, fake)

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *values: Any) -> Any:
            result = _below(op.library_op, keyset, values)
            outs = result if isinstance(result, tuple) else (result,)
            given = dict(zip((n for n, _ in kinds), values, strict=False))
            given |= dict(zip(op.outputs, outs, strict=True))
            needed = zip(op.arguments, ctx.needs_input_grad[1:], strict=False)
            ctx.wanted = [n for n, needs in needed if needs]
            ctx.reads = declared.reads(given, ctx.wanted)
            ctx.save_for_backward(*(given[n] for n in ctx.reads))
            ctx.plain = {n: given[n] for n in plain_names}
            ctx.backend = values[count + 1] or selection.current.get()
            ctx.set_materialize_grads(False)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if all(g is None for g in grads):
                return (None,) * (count + 3)
            saved = ctx.saved_tensors  # a checkpoint gives them once
            given = dict.fromkeys(readable) | dict(zip(ctx.reads, saved, strict=True))
            by_output = dict(zip(op.outputs, grads, strict=True))
            reached = declared.reached(by_output, ctx.wanted)
            again = {n: m for n, m in declared.shared(given).items() if {n, m} <= set(reached)}
            chosen = [n for n in reached if n not in again]
            present = [g for g in grads if g is not None]
            if (
                torch.is_grad_enabled()
                or transformed((*present, *saved))
                or any(map(is_batched_gradient, present))
            ):
                found = declared.formula(by_output, given | ctx.plain, chosen)
            else:
                values = [given[n] for n in readable]
                wanted = [n in chosen for n in tensors]
                got = node(list(grads), values, *ctx.plain.values(), wanted, ctx.backend)
                found = dict(zip([n for n in tensors if n in chosen], got, strict=True))
            found |= {n: found[m] for n, m in again.items()}
            return (None, *(found.get(n) for n in op.arguments), None, None)

    Recorded.__name__ = Recorded.__qualname__ = f"{op.name}_recorded"
    return Recorded


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
        return [
            backward.own(g, torch.empty_like(s), taken) for g, s in zip(got, sources, strict=True)
        ]

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
