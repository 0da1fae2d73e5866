"""Whether the functions of a class have been patched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
SIMPLE = (bool, int, float, str)
COPIED = "__slotnames__"  # Python adds it to a class when the first of its objects is copied


class Code:
    """A snapshot of a class's functions and settings, and of the global functions and numbers that
    its forward reads: also in other methods, and in functions of its own package."""

    def __init__(self, kind: type) -> None:
        classes = [k for k in kind.__mro__ if k not in (nn.Module, object)]
        self.classes = {k: (vars(k), _copied(vars(k))) for k in classes}
        self.called: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        package = kind.__module__.partition(".")[0]
        pending = [vars(k).get(n) for k in classes for n in ("forward", "__call__")]
        seen: set[FunctionType] = set()
        while pending:
            function = pending.pop()
            if not isinstance(function, FunctionType) or function in seen:
                continue
            seen.add(function)
            names = function.__globals__
            for name in _names(function.__code__):
                pending += [vars(k).get(name) for k in classes]
                value = names.get(name)
                if isinstance(value, FUNCTIONS) or type(value) in SIMPLE:
                    self.called[id(names), name] = names, name, value
                if (getattr(value, "__module__", None) or "").partition(".")[0] == package:
                    pending.append(value)


def _copied(names: Mapping[str, Any]) -> dict[str, Any]:
    """What a class holds, with its containers as they are now."""
    return {n: v.copy() if type(v) in (dict, list, set) else v for n, v in names.items()}


def _names(code: CodeType) -> Iterator[str]:
    """The names in a function, and in those that it defines."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


class Codes:
    """Snapshots of several classes. What they have in common, such as a base class, is compared
    once."""

    def __init__(self, codes: Iterable[Code]) -> None:
        codes = list(codes)
        self._classes = list({k: v for code in codes for k, v in code.classes.items()}.values())
        self._called = list({k: v for code in codes for k, v in code.called.items()}.values())

    def hold(self) -> bool:
        for now, then in self._classes:
            if now != then:
                if COPIED in now:
                    then[COPIED] = now[COPIED]
                if now != then:
                    return False
        for names, name, function in self._called:
            if name not in names or names[name] is not function:
                return False
        return True


_codes: WeakKeyDictionary[type, list[Code]] = WeakKeyDictionary()


def code_of(kind: type) -> Code:
    """The snapshot that matches a class now: the same object until the class is patched, and again
    after the patch is undone."""
    known = _codes.setdefault(kind, [])
    found = next((code for code in known if _holds(code)), None)
    if found is None:
        found = Code(kind)
        known[:] = [found, *known[:3]]
    return found


def _holds(code: Code) -> bool:
    try:
        return Codes([code]).hold()
    except (RuntimeError, ValueError, TypeError):
        return False
