"""How an op becomes torch.ops.kernelwright.<name>: schema, fake kernel, gradient.

Eager calls never come here; torch.compile, autograd, tensor subclasses and dispatch modes do.
The gradient is that of the reference, recomputed in float32: statistics and weight gradients
accumulate in float32, nothing saved is overwritten, and a call that needs no gradient pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .written import compile_around

if TYPE_CHECKING:
    from .op import Op

# the name of the package: a Hub package is a copy of this folder under a name of its own
NAMESPACE = __name__.partition(".")[0]
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
# every op also takes the chain to reproduce and the backend, so that a graph keeps both; an empty
# backend is the one of the `use_backend` around the graph when it runs
_HOW = 'str exact="", str backend=""'


def arguments(schema: str) -> list[tuple[str, str]]:
    """(name, type) of each argument of a schema such as "(Tensor x, Tensor? w=None) -> Tensor"."""
    given, _ = _split(schema)
    return [(_name(a), a.split()[0]) for a in given]


def define(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Make torch.ops.kernelwright.<name> from what it runs and what it says of its outputs."""
    _library.define(name + schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def define_unrecorded(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    op: Op | None = None,
) -> Callable[..., Any]:
    """The same for graphs of torch.compile in which no gradient is recorded. A call of it with
    plain tensors goes around the dispatcher, which takes longer for an op in Python than the rest
    of the call does: straight to `run`, or to the plans of `op`."""
    defined: Any = define(name, schema, run, fake)
    given = ", ".join(a.split(None, 1)[1] for a in _split(schema)[0])
    # what torch.ops.kernelwright.<name>.default calls; whoever traces it brings other tensors
    if through := getattr(defined, "_op", None):
        defined._op = compile_around(arguments(schema), given, through, run, op)
    return defined


def register(op: Op) -> Callable[..., Any]:
    """Define the functional op with its fake kernel and its gradient."""
    arguments, _ = _split(op.schema)

    def run(*values: Any) -> Any:
        *args, exact, backend = values
        return op.compute(tuple(args), None, exact or None, backend or op.surrounding(), False)

    def fake(*values: Any) -> Any:
        *args, exact, backend = values
        op.validate(tuple(args), None, exact or None, backend or "auto")
        outs = op.allocate(*args)
        return outs[0] if len(outs) == 1 else outs

    run, fake = _with_defaults(op, run), _with_defaults(op, fake)
    defined = define(op.name, _with_how(op), run, fake)
    recompute_gradient(op.name, arguments, op.reference, hidden=2)
    return defined


def register_unrecorded(op: Op) -> Callable[..., Any]:
    """Define `<name>_unrecorded` for graphs of torch.compile in which no gradient is recorded."""

    def run(*values: Any) -> Any:
        *args, exact, backend = values
        return op.run(*args, None, exact or None, backend or None, False)

    name = f"{op.name}_unrecorded"
    return define_unrecorded(name, _with_how(op), _with_defaults(op, run), op.library_op, op)


def register_inplace(op: Op) -> Callable[..., Any]:
    """Define `<name>_`, which overwrites the arguments listed in `op.inplace`."""
    arguments, _ = _split(op.schema)
    marks = iter("abcdef")
    marked = [
        a.replace("Tensor", f"Tensor({next(marks)}!)", 1) if _name(a) in op.inplace else a
        for a in arguments
    ]

    def run(*values: Any) -> None:
        *args, exact, backend = values
        op.compute(tuple(args), None, exact or None, backend or op.surrounding(), True)

    def fake(*values: Any) -> None:
        *args, exact, backend = values
        op.validate(tuple(args), None, exact or None, backend or "auto", True)

    schema = f"({', '.join((*marked, _HOW))}) -> ()"
    return define(f"{op.name}_", schema, _with_defaults(op, run), _with_defaults(op, fake))


def recompute_gradient(
    name: str, arguments: list[str], function: Callable[..., Any], hidden: int
) -> None:
    """Give torch.ops.kernelwright.<name> the gradient of `function`, which is run again for it.

    `arguments` are those of the schema that the function takes; `hidden` more follow them.
    """
    plain = ", ".join(a.split("=")[0] for a in arguments)
    count = len(arguments)

    def run(grads: list[Tensor], *values: Any) -> list[Tensor]:
        *args, wanted = values
        leaves = [
            a.detach().requires_grad_() if w else a for a, w in zip(args, wanted, strict=True)
        ]
        with torch.enable_grad():
            outs = function(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        sources = [a for a, w in zip(leaves, wanted, strict=True) if w]
        # an output may not depend on what is wanted: a residual sum on the weight
        reached = [(o, g) for o, g in zip(outs, grads, strict=True) if o.requires_grad]
        ends, incoming = [o for o, _ in reached], [g for _, g in reached]
        got = torch.autograd.grad(ends, sources, incoming, allow_unused=True)
        taken = {g.untyped_storage().data_ptr() for g in grads}
        return [_own(g, s, taken) for g, s in zip(got, sources, strict=True)]

    def fake(grads: list[Tensor], *values: Any) -> list[Tensor]:
        *args, wanted = values
        return [torch.empty_like(a) for a, w in zip(args, wanted, strict=True) if w]

    schema = f"(Tensor[] grads, {plain}, bool[] wanted) -> Tensor[]"
    again = define(f"{name}_backward", schema, run, fake)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        args = inputs[:count]
        ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)))
        ctx.values = [None if isinstance(a, Tensor) else (a,) for a in args]

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        args = [next(saved) if v is None else v[0] for v in ctx.values]
        wanted = [bool(n) for n in ctx.needs_input_grad[:count]]
        # autograd does not see the trailing arguments that hold their default
        wanted += [False] * (count - len(wanted))
        got = iter(again(list(grads), *args, wanted))
        return (*(next(got) if w else None for w in wanted), *[None] * hidden)

    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_library
    )


def _own(grad: Tensor | None, source: Tensor, taken: set[int]) -> Tensor:
    """A gradient in memory of its own, laid out as the fake kernel promised."""
    like = torch.empty_like(source)
    if grad is None:
        return like.zero_()
    pointer = grad.untyped_storage().data_ptr()
    if pointer in taken or grad.stride() != like.stride() or grad.dtype != like.dtype:
        return like.copy_(grad)
    taken.add(pointer)
    return grad


def _split(schema: str) -> tuple[list[str], str]:
    arguments, returns = schema.rsplit("->", 1)
    return arguments.strip()[1:-1].split(", "), returns.strip()


def _with_how(op: Op) -> str:
    arguments, returns = _split(op.schema)
    return f"({', '.join((*arguments, _HOW))}) -> {returns}"


def _name(argument: str) -> str:
    return argument.split("=")[0].split()[-1]


def _with_defaults(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """The dispatcher drops trailing arguments that hold their default; put them back."""
    schema = torch._C.parse_schema(f"{NAMESPACE}::{op.name}{op.schema}")
    defaults = [a.default_value for a in schema.arguments] + ["", ""]

    def call(*values: Any) -> Any:
        return function(*values, *defaults[len(values) :])

    return call
