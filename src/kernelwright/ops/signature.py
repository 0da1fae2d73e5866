"""The signature of a call, as a function written out for each op.

A loop over an op's arguments asks each what it is, on every call. Which are tensors is known from
the schema, so the look-up key is compiled once an op, as namedtuple and dataclass do it:

    def signature(args, exact, backend, inplace):
        input, weight, eps = args
        if type(input) not in PLAIN or ...:
            return None
        return exact, backend, inplace, input.shape, input.stride(), ..., eps
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PLAIN = frozenset((Tensor, torch.nn.Parameter))


def compile_signature(arguments: list[tuple[str, str]]) -> Callable[..., tuple[Any, ...] | None]:
    """For (name, schema type) pairs: the hashable key of a call, or None if the dispatcher has to
    see it (a tensor subclass, or a gradient to record)."""
    odd, grads, parts = [], [], []
    for name, kind in arguments:
        if not kind.startswith("Tensor"):
            parts.append(name)
            continue
        key = f"{name}.shape, {name}.stride(), {name}.dtype, {name}.device"
        if kind.endswith("?"):
            odd.append(f"({name} is not None and type({name}) not in PLAIN)")
            grads.append(f"({name} is not None and {name}.requires_grad)")
            parts.append(f"None if {name} is None else ({key})")
        else:
            odd.append(f"type({name}) not in PLAIN")
            grads.append(f"{name}.requires_grad")
            parts.append(key)
    names = ", ".join(name for name, _ in arguments)
    source = (
        "def signature(args, exact, backend, inplace):\n"
        f"    {names}, = args\n"
        f"    if {' or '.join(odd)}:\n"
        "        return None\n"
        f"    if grad_enabled() and ({' or '.join(grads)}):\n"
        "        return None\n"
        f"    return exact, backend, inplace, {', '.join(parts)}\n"
    )
    scope: dict[str, Any] = {"PLAIN": PLAIN, "grad_enabled": torch.is_grad_enabled}
    exec(compile(source, "<signature>", "exec"), scope)
    return scope["signature"]
