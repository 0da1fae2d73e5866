"""Whether the forward of a class does more than compute its result, as far as its bytecode shows.

Libraries' modules are known to be pure. Code of others is looked at: its forward, the methods and
functions of its own package that it calls. Setting an attribute, a global or an item of either, or
calling a method that changes a container or an attribute in place, is an effect; filling a list or
a dict that the function itself has made is none. Reading Python's or NumPy's random numbers, the
time or the environment counts as an effect too.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ...library_internals import CACHE_ARGUMENT

# instructions that change something outside of a call
STORES = frozenset(("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"))
BUILDS = frozenset(("BUILD_LIST", "BUILD_MAP", "BUILD_SET"))
ITEMS = frozenset(("STORE_SUBSCR", "DELETE_SUBSCR"))
LOADS = frozenset(("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"))
# methods that change the object they are called on, and functions that write somewhere
CHANGES = frozenset(
    (
        *("append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault"),
        *("appendleft", "rotate", "popitem", "discard", "put", "put_nowait", "send"),
        *("write", "writelines", "print", "save", "setattr", "delattr", "register_buffer"),
        *("debug", "info", "warning", "warn", "error", "exception"),
    )
)
# modules whose functions may give another result at each call
UNREPEATABLE = frozenset(("random", "secrets", "time", "datetime", "uuid", "os", "numpy.random"))


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
        for code, steps in _codes(function.__code__):
            for i, step in enumerate(steps):
                name = step.argval if isinstance(step.argval, str) else ""
                outer = step.opname == "STORE_DEREF" and name in function.__code__.co_freevars
                if step.opname in STORES or outer:
                    return f"{code.co_name} of {kind.__name__} sets {name}"
                if step.opname in ITEMS and (name := _outside(code, steps[:i])):
                    return f"{code.co_name} of {kind.__name__} sets an item of {name}"
                if step.opname == "IMPORT_NAME" and name in UNREPEATABLE:
                    return f"{code.co_name} of {kind.__name__} reads {name}"
                if step.opname not in LOADS:
                    continue
                known_change = _is_own_container(code, steps, i) or _is_of_cache(code, steps, i)
                if (name in CHANGES and not known_change) or _writes_to_attribute(steps[:i], name):
                    return f"{code.co_name} of {kind.__name__} calls {name}"
                if step.opname == "LOAD_GLOBAL" and _is_unrepeatable(
                    function, name, steps[i + 1 :]
                ):
                    return f"{code.co_name} of {kind.__name__} reads {name}"
                pending += [getattr(kind, name, None), function.__globals__.get(name)]
                if "super" in code.co_names:
                    pending += [vars(base).get(name) for base in kind.__mro__]
    return None


def _is_unrepeatable(function: FunctionType, name: str, after: list[dis.Instruction]) -> bool:
    """Whether a global is one of the UNREPEATABLE modules, or a function of one."""
    value = function.__globals__.get(name)
    if isinstance(value, ModuleType) and after and isinstance(after[0].argval, str):
        value = getattr(value, after[0].argval, value)
    if isinstance(value, ModuleType):
        return value.__name__ in UNREPEATABLE
    owner = getattr(value, "__self__", None)  # functions of `random` are methods of one object
    place = getattr(value, "__module__", None) or type(owner).__module__
    return str(place) in UNREPEATABLE


def _codes(code: CodeType) -> Iterator[tuple[CodeType, list[dis.Instruction]]]:
    """A function's code and that of the functions in it."""
    yield code, list(dis.get_instructions(code))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _is_own_container(code: CodeType, steps: list[dis.Instruction], i: int) -> bool:
    """Whether the method loaded by instruction `i` is one of a list, dict or set that the function
    itself has made: a variable that is never set to anything else."""
    variable = _variable_before(steps, i)
    if variable is None:
        return False
    if steps[i - 1].opname == "LOAD_DEREF" and variable not in code.co_cellvars:
        return False
    stores = [n for n, step in enumerate(steps) if variable in _stored(step)]
    return bool(stores) and all(_is_built(steps, n) for n in stores)


def _is_of_cache(code: CodeType, steps: list[dis.Instruction], i: int) -> bool:
    """Whether instruction `i` loads `update` of a key-value cache that the function is given under
    transformers' name. A second run of a block gets a copy of such a cache; blocks that are given
    any other object run once."""
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    variable = _variable_before(steps, i)
    return steps[i].argval == "update" and variable == CACHE_ARGUMENT and variable in arguments


def _variable_before(steps: list[dis.Instruction], i: int) -> str | None:
    """The variable that lies on top of the stack before instruction `i`."""
    before = steps[i - 1] if i else None
    if before is None or not ("LOAD_FAST" in before.opname or before.opname == "LOAD_DEREF"):
        return None
    return before.argval[-1] if isinstance(before.argval, tuple) else before.argval


def _stored(step: dis.Instruction) -> tuple[Any, ...]:
    """The variables that an instruction sets: newer Pythons set two, or set one and load one."""
    if not step.opname.startswith(("STORE_FAST", "STORE_DEREF")):
        return ()
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return names[:1] if "LOAD" in step.opname else names


def _is_built(steps: list[dis.Instruction], n: int) -> bool:
    """Whether what instruction `n` stores is a new container: `a, b = [], {}` makes both first."""
    first = n
    while first and _stored(steps[first - 1]):
        first -= 1
    depth = sum(len(_stored(step)) for step in steps[first : n + 1])
    if first and steps[first - 1].opname in ("ROT_TWO", "SWAP"):
        first -= 1
    made = steps[max(first - depth, 0) : first]
    return len(made) == depth and all(step.opname in BUILDS for step in made)


def _writes_to_attribute(before: list[dis.Instruction], name: str) -> bool:
    """Whether this is the name of a method in place (`add_`), of an attribute or a global."""
    in_place = name.endswith("_") and not name.startswith("_")
    return in_place and bool(before) and before[-1].opname in ("LOAD_ATTR", "LOAD_GLOBAL")


def _outside(code: CodeType, before: list[dis.Instruction]) -> str:
    """The name of the container of which an item is set, if it is not one that the function itself
    has made; `before` are the instructions up to that."""
    missing, made = 1, before[-1]  # the key lies on top of the container
    while before and missing > 0:
        made = before.pop()
        missing -= dis.stack_effect(made.opcode, made.arg, jump=False)
    if missing < 0:  # one instruction loads both
        kind, name = "LOAD_FAST", made.argval[0]
    elif not before or not isinstance(before[-1].argval, str):
        return ""
    else:
        kind, name = before[-1].opname, before[-1].argval
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if kind.startswith("LOAD_FAST"):
        return name if name in arguments else ""
    if kind == "LOAD_DEREF":
        return name if name in code.co_freevars else ""
    return name if kind.startswith("LOAD_") else ""
