"""The signature of a call, as a function written out for each op.

A loop over an op's arguments asks each what it is, on every call. Which are tensors is known from
the schema, so the look-up key is compiled once an op, as namedtuple and dataclass do it:

    def signature(args, exact, backend, inplace):
        input, weight, eps, = args
        if type(input) not in _PLAIN or ... or input.is_neg() or ...:
            return None
        return exact, backend, inplace, input.shape, input.stride(), ..., eps
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor

# (name, schema type) of each argument
Arguments = list[tuple[str, str]]

PLAIN = frozenset((Tensor, torch.nn.Parameter))
# what the texts below call by name
SCOPE: Mapping[str, Any] = {"_PLAIN": PLAIN, "_recording": torch.is_grad_enabled}


def compile_signature(arguments: Arguments) -> Callable[..., tuple[Any, ...] | None]:
    """The hashable key of a call, or None if the dispatcher has to see it."""
    source = (
        "def signature(args, exact, backend, inplace):\n"
        f"    {names(arguments)} = args\n"
        f"    if {dispatched(arguments)}:\n"
        "        return None\n"
        f"    return {key(arguments)}\n"
    )
    return written("signature", source, SCOPE)


def names(arguments: Arguments) -> str:
    return "".join(f"{name}, " for name, _ in arguments).rstrip()


def key(arguments: Arguments) -> str:
    """Text: all that decides about a call but the addresses of its tensors."""
    parts = ["exact", "backend", "inplace"]
    for name, kind in arguments:
        layout = f"{name}.shape, {name}.stride(), {name}.dtype, {name}.device"
        if not kind.startswith("Tensor"):
            parts.append(name)
        elif kind.endswith("?"):
            parts.append(f"None if {name} is None else ({layout})")
        else:
            parts.append(layout)
    return ", ".join(parts)


def dispatched(arguments: Arguments) -> str:
    """Text: whether the dispatcher has to see a call, for a tensor subclass, for a gradient, or
    for a tensor that is the negative of its memory."""
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


def layouts(out: Any) -> tuple[Any, ...]:
    """What of the outputs that a caller gives belongs to the signature."""
    return tuple(
        None if o is None else (o.shape, o.stride(), o.dtype, o.device, o.is_neg())
        for o in (out if type(out) is tuple else (out,))
    )


def written(name: str, source: str, scope: Mapping[str, Any]) -> Any:
    """The function of this name that `source` defines, with the names that it uses."""
    found = dict(scope)
    exec(_code(name, source), found)
    return found[name]


@functools.lru_cache(1024)
def _code(name: str, source: str) -> CodeType:
    return compile(source, f"<{name}>", "exec")
