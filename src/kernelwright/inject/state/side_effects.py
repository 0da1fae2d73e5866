"""Whether the forward of a class does more than compute its result, as far as its bytecode shows.

Libraries' modules are known to be pure. Code of others is looked at: its forward, the methods and
functions of its own package that it calls. Setting an attribute or a global, or calling a method
that changes a container, is an effect.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

# instructions that change something outside of a call
STORES = frozenset(("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"))
LOADS = frozenset(("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"))
# methods that change the object they are called on, and functions that write somewhere
CHANGES = frozenset(
    (
        *("append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault"),
        *("put", "write", "print", "save", "setattr", "delattr", "register_buffer"),
    )
)


def visible_effect(kind: type, known: Callable[[Any], bool]) -> str | None:
    """What the forward of a class does beside returning a result, or None. Functions that are
    `known` to be pure are not looked at."""
    seen: set[FunctionType] = set()
    pending: list[Any] = [kind.forward]  # type: ignore[attr-defined]
    while pending:
        function = pending.pop()
        if not isinstance(function, FunctionType) or function in seen or known(function):
            continue
        seen.add(function)
        for step, code in _steps(function.__code__):
            name = step.argval if isinstance(step.argval, str) else ""
            if step.opname in STORES:
                return f"{code.co_name} of {kind.__name__} sets {name}"
            if step.opname not in LOADS:
                continue
            if name in CHANGES:
                return f"{code.co_name} of {kind.__name__} calls {name}"
            pending += [getattr(kind, name, None), function.__globals__.get(name)]
    return None


def _steps(code: CodeType) -> Iterator[tuple[dis.Instruction, CodeType]]:
    for step in dis.get_instructions(code):
        yield step, code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _steps(inner)
