"""Whether the functions of a class have been patched."""

from __future__ import annotations

from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType
from weakref import WeakKeyDictionary

from torch import nn

FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
COPIED = "__slotnames__"  # Python adds it to a class when the first of its objects is copied


class Code:
    """A snapshot of a class's functions, and of the global functions that its forward calls."""

    def __init__(self, kind: type) -> None:
        classes = [k for k in kind.__mro__ if k not in (nn.Module, object)]
        found = [vars(k).get(n) for k in classes for n in ("forward", "__call__")]
        functions = [f for f in found if isinstance(f, FunctionType)]
        self.classes = {k: (vars(k), dict(vars(k))) for k in classes}
        self.called = {
            (id(f.__globals__), name): (f.__globals__, name, f.__globals__[name])
            for f in functions
            for name in f.__code__.co_names
            if isinstance(f.__globals__.get(name), FUNCTIONS)
        }


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
