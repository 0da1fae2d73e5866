"""How an op becomes torch.ops.kernelwright.<name>: schema, kernel, fake kernel.

Eager calls never come here; torch.compile, autograd, tensor subclasses and dispatch modes do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

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
    given, _ = split(schema)
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
    given = ", ".join(a.split(None, 1)[1] for a in split(schema)[0])
    # what torch.ops.kernelwright.<name>.default calls; whoever traces it brings other tensors
    if through := getattr(defined, "_op", None):
        defined._op = compile_around(arguments(schema), given, through, run, op)
    return defined


def register(op: Op) -> Callable[..., Any]:
    """Define the functional op with its fake kernel."""

    def run(*values: Any) -> Any:
        *args, exact, backend = values
        return op.compute(tuple(args), None, exact or None, backend or op.surrounding(), False)

    def fake(*values: Any) -> Any:
        *args, exact, backend = values
        op.validate(tuple(args), None, exact or None, backend or "auto")
        outs = op.allocate(*args)
        return outs[0] if len(outs) == 1 else outs

    run, fake = _with_defaults(op, run), _with_defaults(op, fake)
    return define(op.name, _with_how(op), run, fake)


def register_unrecorded(op: Op) -> Callable[..., Any]:
    """Define `<name>_unrecorded` for graphs of torch.compile in which no gradient is recorded."""

    def run(*values: Any) -> Any:
        *args, exact, backend = values
        return op.run(*args, None, exact or None, backend or None, False)

    name = f"{op.name}_unrecorded"
    return define_unrecorded(name, _with_how(op), _with_defaults(op, run), op.library_op, op)


def register_inplace(op: Op) -> Callable[..., Any]:
    """Define `<name>_`, which overwrites the arguments listed in `op.inplace`."""
    arguments, _ = split(op.schema)
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


def implement(name: str, recorded: Callable[..., Any], batched: Callable[..., Any]) -> None:
    """What torch.ops.kernelwright.<name> does where autograd sees it, and under torch.vmap."""
    _library.impl(name, recorded, "Autograd", with_keyset=True)
    _library.impl(name, batched, "FuncTorchBatched")


def split(schema: str) -> tuple[list[str], str]:
    arguments, returns = schema.rsplit("->", 1)
    return arguments.strip()[1:-1].split(", "), returns.strip()


def _with_how(op: Op) -> str:
    arguments, returns = split(op.schema)
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
