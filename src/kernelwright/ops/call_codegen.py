"""Generates the code that every call of an op runs, as text that `exec` compiles.

This is the only file that generates code. A call that loops over its arguments and passes them on
as `*args` takes longer than the driver takes to launch. Which arguments are tensors is known from
the schema, so the text names each of them, as namedtuple and dataclass do it: the generated look-up
saves 0.5 us for rmsnorm and 1.8 us for an op of nine arguments. All other names in the text begin
with an underscore, so an op's arguments may have any name. For rmsnorm the text is

    def call(input, weight, eps, out=None, exact=None, backend=None, inplace=False):
        _args = input, weight, eps,
        if _traced() or _stack() and _modes() or _forward_ad._current_level >= 0 or (
            type(input) not in _PLAIN or ... weight.requires_grad)):
            return _op.slow_call(_args, out, exact, backend, inplace)
        if backend is None:
            backend = _surrounding()
        try:
            _key = exact, backend, inplace, input.shape, input.is_contiguous() or ..., eps
            _plan = _op._plans.get(_key if out is None else (_key, _layouts(out)))
        except (TypeError, AttributeError, RuntimeError):
            _plan = None
        if _plan is None:
            return _op.slow_call(_args, out, exact, backend, inplace)
        try:
            return _plan(_args, out)
        except RuntimeError:
            if not _in_functorch():
                raise
        return _op.slow_call(_args, out, exact, backend, inplace)

and the plan that it finds, if no argument has to be copied before the launch,

    def follow(_args, _given):
        input, weight, eps, = _args
        if _given is None:
            out, = _allocate(input, weight, eps,)
        else:
            out = _given
            if type(out) is tuple:
                return _plan.follow_any(_args, _given)
        _0, _1, _2, = input.data_ptr(), weight.data_ptr(), out.data_ptr(),
        if (_0 | _1 | _2) & 15:
            return _plan.realigned(_0 | _1 | _2, _args, (out,))
        _launch((_0, _1, _2,))
        return out

A graph of torch.compile finds its plan without the dispatcher:

    def direct(_self, input, weight=None, eps=1e-6, exact="", backend=""):
        if _stack() and _modes() or _forward_ad._current_level >= 0 or ... weight.requires_grad)):
            return _through_dispatcher(input, weight, eps, exact, backend,)
        try:
            exact, backend, inplace = exact or None, backend or _surrounding(), False
            _plan = _op._plans.get((exact, backend, inplace, input.shape, ..., eps))
            ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any, Protocol

import torch

from ..backends.torch_internals import dispatch_modes, dispatch_stack, forward_ad, in_functorch
from . import selection
from .op_protocol import DeclaredOp
from .plan_cache import PLAIN, layouts

# (name, schema type) of each argument
Arguments = list[tuple[str, str]]


class Launched(Protocol):
    """What `compile_follow` needs of a plan that launches a kernel."""

    op: DeclaredOp
    how: Any
    pointers: list[str]
    mask: int | None
    launch: Callable[[Any], None]


_KEY = """
def key(args, exact, backend, inplace):
    {names} = args
    if {dispatched}:
        return None
    return {key}
"""

_CALL = """
def call({names} out=None, exact=None, backend=None, inplace=False):
    _args = {names}
    if _traced() or _stack() and _modes() or _forward_ad._current_level >= 0 or {dispatched}:
        return _op.slow_call(_args, out, exact, backend, inplace)
    if backend is None:
        backend = _surrounding()
    try:
        _key = {key}
        _plan = _op._plans.get(_key if out is None else (_key, _layouts(out)))
    except (TypeError, AttributeError, RuntimeError):
        _plan = None
    if _plan is None:
        return _op.slow_call(_args, out, exact, backend, inplace)
    try:
        return _plan(_args, out)
    except RuntimeError:
        # a tensor of torch.func has no address, and one of another layout may have the same key;
        # to ask before every launch takes longer
        if not _in_functorch():
            _op.validate(_args, out, exact, backend, inplace)
            raise
    return _op.slow_call(_args, out, exact, backend, inplace)
"""

_DIRECT = """
def direct(_self, {parameters}):
    if _stack() and _modes() or _forward_ad._current_level >= 0 or {dispatched}:
        return _through_dispatcher({names})
    try:
        {body}
    except RuntimeError:
        if not _in_functorch():
            raise
    return _through_dispatcher({names})
"""
_PLANNED = """exact, backend, inplace = exact or None, backend or _surrounding(), False
        _args = {names}
        _plan = _op._plans.get(({key}))
        if _plan is None:
            return _op.compute(_args, None, exact, backend, False)
        return _plan(_args, None)"""


def compile_key(arguments: Arguments) -> Callable[..., tuple[Any, ...] | None]:
    """A function that returns a call's signature, or None if the dispatcher has to see the call."""
    source = _KEY.format(
        names=_names(arguments), dispatched=_dispatched(arguments), key=_key(arguments)
    )
    return _compiled("key", source, _scope(None))


def compile_call(op: DeclaredOp, arguments: Arguments) -> Callable[..., Any]:
    """The call of an op with its arguments by position, then out, exact, backend and inplace."""
    source = _CALL.format(
        names=_names(arguments), dispatched=_dispatched(arguments), key=_key(arguments)
    )
    # of the states that torch.compiler.is_compiling covers, the other checks miss Dynamo's only
    scope = {**_scope(op), "_traced": torch.compiler.is_dynamo_compiling}
    call = _compiled("call", source, scope)
    call.__name__ = call.__qualname__ = op.name
    return call


def compile_direct(
    arguments: Arguments,
    parameters: str,
    through_dispatcher: Callable[..., Any],
    run: Callable[..., Any],
    op: DeclaredOp | None,
) -> Callable[..., Any]:
    """The method `__call__` of an overload: `run`, or the plan of `op`, whose last arguments are
    exact and backend; through the dispatcher where it has to see the call. `parameters` are the
    arguments as Python writes them, with their defaults."""
    own = arguments if op is None else arguments[:-2]
    body = f"return _run({_names(arguments)})"
    if op is not None:
        body = _PLANNED.format(names=_names(own), key=_key(own))
    source = _DIRECT.format(
        parameters=parameters, names=_names(arguments), dispatched=_dispatched(own), body=body
    )
    scope = {**_scope(op), "_through_dispatcher": through_dispatcher, "_run": run}
    return _compiled("direct", source, scope)


def compile_follow(plan: Launched) -> Callable[[tuple[Any, ...], Any], Any]:
    """The launch of a plan that copies no argument: collect the addresses of `pointers`, launch."""
    op, on_gpu = plan.op, plan.mask is not None
    # in place, an output is another name for an argument
    places = dict(zip(op.outputs, op.inplace, strict=True)) if plan.how.inplace else {}
    pointers = [places.get(n, n) for n in plan.pointers]
    numbered = {n: f"_{i}" for i, n in enumerate(dict.fromkeys(pointers))}
    results = [places.get(n, n) for n in op.outputs]
    lines = [f"{_listed(op.arguments)} = _args"]
    if not places:
        # a single output comes by itself; of several, some may be None
        several = len(results) > 1
        absent = (
            " or ".join(f"{n} is None" for n in results)
            if several
            else f"type({results[0]}) is tuple"
        )
        lines += [
            "if _given is None:",
            f"    {_listed(results)} = _allocate({_listed(op.arguments)})",
            "else:",
            f"    {_listed(results) if several else results[0]} = _given",
            f"    if {absent}:",
            "        return _plan.follow_any(_args, _given)",
        ]
    taken = (f"{n}.data_ptr()" if on_gpu else n for n in numbered)
    lines.append(f"{_listed(numbered.values())} = {_listed(taken)}")
    if len(places) > 1:
        first, second = (f"{n}.data_ptr()" for n in results)
        lines += [f"if {first} == {second}:", "    return _plan.follow_any(_args, None)"]
    if on_gpu:
        bits = " | ".join(numbered.values())
        again = f"_plan.realigned({bits}, _args, ({_listed(results)}))"
        lines += [f"if ({bits}) & {plan.mask}:", f"    return {again}"]
    lines += [
        f"_launch(({_listed(numbered[n] for n in pointers)}))",
        f"return {', '.join(results)}",
    ]
    return _compiled(
        "follow",
        "def follow(_args, _given):\n" + "".join(f"    {line}\n" for line in lines),
        {"_plan": plan, "_allocate": op.allocate, "_launch": plan.launch},
    )


def _key(arguments: Arguments) -> str:
    """Text: everything that decides what a call does, but the addresses of its tensors.

    A contiguous tensor has the strides of its shape, but for dimensions of one element, along which
    no kernel moves; to ask for all strides takes twice as long."""
    parts = ["exact", "backend", "inplace"]
    for name, kind in arguments:
        strides = f"{name}.is_contiguous() or {name}.stride()"
        layout = f"{name}.shape, {strides}, {name}.dtype, {name}.device"
        if not kind.startswith("Tensor"):
            parts.append(name)
        elif kind.endswith("?"):
            parts.append(f"None if {name} is None else ({layout})")
        else:
            parts.append(layout)
    return ", ".join(parts)


def _dispatched(arguments: Arguments) -> str:
    """Text: whether the dispatcher has to see a call, because of a tensor subclass, a gradient, or
    a tensor that is the negative of its memory."""
    odd, negative, grads = [], [], []
    for name, kind in arguments:
        if kind == "Tensor[]":
            odd.append(f"not _PLAIN.issuperset(map(type, {name}))")
            negative.append(f"any(_t.is_neg() for _t in {name})")
            grads.append(f"any(_t.requires_grad for _t in {name})")
        elif kind.startswith("Tensor"):
            there = f"{name} is not None and " if kind.endswith("?") else ""
            odd.append(f"{there}type({name}) not in _PLAIN")
            negative.append(f"{there}{name}.is_neg()")
            grads.append(f"{there}{name}.requires_grad")
    return f"{' or '.join(odd + negative)} or _recording() and ({' or '.join(grads)})"


def _names(arguments: Arguments) -> str:
    return _listed(name for name, _ in arguments)


def _listed(names: Iterable[str]) -> str:
    return "".join(f"{name}, " for name in names).rstrip()


def _scope(op: DeclaredOp | None) -> dict[str, Any]:
    """What the texts call by name."""
    return {
        "_op": op,
        "_PLAIN": PLAIN,
        "_recording": torch.is_grad_enabled,
        # nearly always 0, so that modes of our own need not be taken off
        "_stack": dispatch_stack,
        "_modes": dispatch_modes,
        "_in_functorch": in_functorch,
        # the module, because PyTorch rebinds its global _current_level
        "_forward_ad": forward_ad,
        "_surrounding": selection.current.get,
        "_layouts": layouts,
    }


def _compiled(name: str, source: str, scope: Mapping[str, Any]) -> Any:
    """The function of this name that `source` defines, with `scope` as its globals."""
    found = dict(scope)
    exec(_code(name, source), found)
    return found[name]


@functools.lru_cache(1024)
def _code(name: str, source: str) -> CodeType:
    return compile(source, f"<{name}>", "exec")
