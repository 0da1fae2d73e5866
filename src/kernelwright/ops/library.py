"""How an op becomes torch.ops.kernelwright.<name>: schema, kernel, fake kernel.

Eager calls skip this; torch.compile, autograd, tensor subclasses and dispatch modes come here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..backends.torch_internals import parse_schema
from .call_codegen import compile_direct
from .op_protocol import DeclaredOp
from .rows import with_dense_rows
from .selection import current

# the name of the package: a Hub package is a copy of this folder under a name of its own
NAMESPACE = __name__.partition(".")[0]
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_defined: set[Any] = set()
# every op also takes the eager chain to reproduce and the backend, so that a graph keeps both; with
# an empty backend it asks for the surrounding `use_backend` each time it runs
_HOW = 'str exact="", str backend=""'


def arguments(schema: str) -> list[tuple[str, str]]:
    """(name, type) of each argument of a schema such as "(Tensor x, Tensor? w=None) -> Tensor"."""
    given, _ = split(schema)
    return [(_name(a), a.split()[0]) for a in given]


def define(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Define torch.ops.kernelwright.<name>: `run` is its kernel, `fake` describes its outputs."""
    _library.define(name + schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    found = getattr(getattr(torch.ops, NAMESPACE), name).default
    _defined.add(found)
    return found


def is_another_object(op: Any) -> bool:
    """Whether this is an op of ours, but not the object that was defined. Code that clears
    `torch.ops` leaves PyTorch to make new ones, and graphs that hold those are not understood."""
    return getattr(op, "namespace", None) == NAMESPACE and op not in _defined


def define_unrecorded(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    op: DeclaredOp | None = None,
) -> Callable[..., Any]:
    """The same for graphs of torch.compile in which no gradient is recorded. A call with plain
    tensors runs `run`, or the plan of `op`, without the dispatcher: for an op in Python that takes
    longer than the rest of the call."""
    defined: Any = define(name, schema, run, fake)
    parameters = ", ".join(a.split(None, 1)[1] for a in split(schema)[0])
    overload = type(defined)
    dispatched = functools.partial(overload.__call__, defined)
    call = compile_direct(arguments(schema), parameters, dispatched, run, op)
    # a subclass for its __call__ alone: the object keeps its identity and its hash, and tracing
    # knows it as the OpOverload that it is
    defined.__class__ = type("DirectOverload", (overload,), {"__call__": call})
    return defined


def register(op: DeclaredOp) -> Callable[..., Any]:
    """Define the functional op with its fake kernel."""

    def run(*values: Any) -> Any:
        *args, exact, backend = values
        return op.compute(tuple(args), None, exact or None, backend or current.get(), False)

    def fake(*values: Any) -> Any:
        *args, exact, backend = values
        op.validate(tuple(args), None, exact or None, backend or "auto")
        outs = op.allocate(*with_dense_rows(args))
        return outs[0] if len(outs) == 1 else outs

    run, fake = _with_defaults(op, run), _with_defaults(op, fake)
    return define(op.name, _with_how(op), run, fake)


def register_unrecorded(op: DeclaredOp) -> Callable[..., Any]:
    """Define `<name>_unrecorded` for graphs of torch.compile in which no gradient is recorded."""

    def run(*values: Any) -> Any:
        *args, exact, backend = values
        return op.run(*args, None, exact or None, backend or None, False)

    name = f"{op.name}_unrecorded"
    return define_unrecorded(name, _with_how(op), _with_defaults(op, run), op.library_op, op)


def register_inplace(op: DeclaredOp) -> Callable[..., Any]:
    """Define `<name>_`, which overwrites the arguments listed in `op.inplace`."""
    arguments, _ = split(op.schema)
    marks = iter("abcdef")
    marked = [
        a.replace("Tensor", f"Tensor({next(marks)}!)", 1) if _name(a) in op.inplace else a
        for a in arguments
    ]

    def run(*values: Any) -> None:
        *args, exact, backend = values
        op.compute(tuple(args), None, exact or None, backend or current.get(), True)

    def fake(*values: Any) -> None:
        *args, exact, backend = values
        op.validate(tuple(args), None, exact or None, backend or "auto", True)

    schema = f"({', '.join((*marked, _HOW))}) -> ()"
    return define(f"{op.name}_", schema, _with_defaults(op, run), _with_defaults(op, fake))


def implement(name: str, recorded: Callable[..., Any], batched: Callable[..., Any]) -> None:
    """Register what torch.ops.kernelwright.<name> does at the autograd key and under torch.vmap."""
    _library.impl(name, recorded, "Autograd", with_keyset=True)
    _library.impl(name, batched, "FuncTorchBatched")


def split(schema: str) -> tuple[list[str], str]:
    arguments, returns = schema.rsplit("->", 1)
    return arguments.strip()[1:-1].split(", "), returns.strip()


def _with_how(op: DeclaredOp) -> str:
    arguments, returns = split(op.schema)
    return f"({', '.join((*arguments, _HOW))}) -> {returns}"


def _name(argument: str) -> str:
    return argument.split("=")[0].split()[-1]


def _with_defaults(op: DeclaredOp, function: Callable[..., Any]) -> Callable[..., Any]:
    """Append the defaults: the dispatcher drops trailing arguments that equal theirs."""
    schema = parse_schema(f"{NAMESPACE}::{op.name}{op.schema}")
    defaults = [a.default_value for a in schema.arguments] + ["", ""]

    def call(*values: Any) -> Any:
        return function(*values, *defaults[len(values) :])

    return call
