"""The functions that every call runs through, written out for an op and for a plan.

A call that loops over its arguments, and hands them on by `*args` and keywords, takes longer than
the driver does. Which tensors there are is known beforehand, so both are compiled from a text that
names them. What makes an op's arguments safe to name is that nothing else here lacks the leading
underscore. A call of rmsnorm is

    def call(input, weight, eps, out=None, exact=None, backend=None, inplace=False):
        _args = input, weight, eps,
        if _traced() or _modes() or _forward_ad._current_level >= 0 or (
            type(input) not in _PLAIN or ... weight.requires_grad)):
            return _op.carefully(_args, out, exact, backend, inplace)
        if backend is None:
            backend = _surrounding()
        try:
            _key = exact, backend, inplace, input.shape, input.stride(), ..., eps
            _plan = _op._plans.get(_key if out is None else (_key, _layouts(out)))
        except (TypeError, AttributeError, RuntimeError):
            _plan = None
        if _plan is None:
            return _op.carefully(_args, out, exact, backend, inplace)
        try:
            return _plan(_args, out)
        except RuntimeError:
            if not _in_functorch():
                raise
        return _op.carefully(_args, out, exact, backend, inplace)

and the plan that it finds, if nothing has to be copied before the launch,

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

What a graph of torch.compile calls is written out too, and needs no dispatcher to find a plan:

    def around(input, weight=None, eps=1e-6, exact="", backend=""):
        if _modes() or _forward_ad._current_level >= 0 or ... weight.requires_grad)):
            return _through(input, weight, eps, exact, backend,)
        try:
            exact, backend, inplace = exact or None, backend or _surrounding(), False
            _plan = _op._plans.get((exact, backend, inplace, input.shape, ..., eps))
            ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from . import selection, signature
from .transforms import in_functorch

if TYPE_CHECKING:
    from .op import Op
    from .plan import LaunchPlan, Plan

_CALL = """
def call({names} out=None, exact=None, backend=None, inplace=False):
    _args = {names}
    if _traced() or _modes() or _forward_ad._current_level >= 0 or {dispatched}:
        return _op.carefully(_args, out, exact, backend, inplace)
    if backend is None:
        backend = _surrounding()
    try:
        _key = {key}
        _plan = _op._plans.get(_key if out is None else (_key, _layouts(out)))
    except (TypeError, AttributeError, RuntimeError):
        _plan = None
    if _plan is None:
        return _op.carefully(_args, out, exact, backend, inplace)
    try:
        return _plan(_args, out)
    except RuntimeError:
        # a tensor of torch.func has no address, and one of another layout may have the same key;
        # to ask before every launch takes longer
        if not _in_functorch():
            _op.validate(_args, out, exact, backend, inplace)
            raise
    return _op.carefully(_args, out, exact, backend, inplace)
"""

_AROUND = """
def around({given}):
    if _modes() or _forward_ad._current_level >= 0 or {dispatched}:
        return _through({names})
    try:
        {body}
    except RuntimeError:
        if not _in_functorch():
            raise
    return _through({names})
"""
_PLANNED = """exact, backend, inplace = exact or None, backend or _surrounding(), False
        _args = {names}
        _plan = _op._plans.get(({key}))
        if _plan is None:
            return _op.compute(_args, None, exact, backend, False)
        return _plan(_args, None)"""


def compile_call(op: Op, arguments: signature.Arguments) -> Callable[..., Any]:
    """The call of an op with its arguments by position, then out, exact, backend and inplace."""
    source = _CALL.format(
        names=signature.names(arguments),
        dispatched=signature.dispatched(arguments),
        key=signature.key(arguments),
    )
    # of all that torch.compiler.is_compiling asks, Dynamo alone leaves no other trace here
    scope = {**_scope(op), "_traced": torch.compiler.is_dynamo_compiling}
    call = signature.written("call", source, scope)
    call.__name__ = call.__qualname__ = op.name
    return call


def compile_around(
    arguments: signature.Arguments, given: str, through: Any, run: Any, op: Op | None
) -> Callable[..., Any]:
    """A call whose arguments are `given` as Python writes them: `through` the dispatcher where that
    has to see it; else `run`, or the plan of `op`, whose schema ends with exact and backend."""
    own = arguments if op is None else arguments[:-2]
    body = f"return _run({signature.names(arguments)})"
    if op is not None:
        body = _PLANNED.format(names=signature.names(own), key=signature.key(own))
    source = _AROUND.format(
        given=given,
        names=signature.names(arguments),
        dispatched=signature.dispatched(own),
        body=body,
    )
    return signature.written("around", source, {**_scope(op), "_through": through, "_run": run})


def compile_follow(plan: LaunchPlan) -> Plan:
    """What a plan does that copies nothing: the addresses of its `pointers`, and the launch."""
    op, on_gpu = plan.op, plan.mask is not None
    # in place, an output is another name for an argument
    places = dict(zip(op.outputs, op.inplace, strict=True)) if plan.how.inplace else {}
    pointers = [places.get(n, n) for n in plan.pointers]
    numbered = {n: f"_{i}" for i, n in enumerate(dict.fromkeys(pointers))}
    results = [places.get(n, n) for n in op.outputs]
    lines = [f"{_listed(op.arguments)} = _args"]
    if not places:
        # a single output is given by itself, of several some may be absent
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
    return signature.written(
        "follow",
        "def follow(_args, _given):\n" + "".join(f"    {line}\n" for line in lines),
        {"_plan": plan, "_allocate": op.allocate, "_launch": plan.launch},
    )


def _scope(op: Op | None) -> dict[str, Any]:
    return {
        **signature.SCOPE,
        "_op": op,
        "_modes": torch._C._len_torch_dispatch_stack,
        "_in_functorch": in_functorch,
        # the module, not its level: that is a global that PyTorch sets anew
        "_forward_ad": forward_ad,
        "_surrounding": selection.current.get,
        "_layouts": signature.layouts,
    }


def _listed(names: Iterable[str]) -> str:
    return "".join(f"{name}, " for name in names).rstrip()
