"""Installing forwards on modules, and removing them.

A plain module has its forward on its class. accelerate and diffusers wrap it on the instance and
keep the inner one in a slot of their own (`_old_forward`, a hook's function reference). We always
replace the innermost one, so hooks work whichever came first, and `remove` looks in every slot.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from ...library_internals import forward_slots
from ..state.hooks import MARK, is_ours
from ..state.hooks import is_hooked as hooked

__all__ = [
    "MARK",
    "class_forward",
    "hooked",
    "install",
    "installed",
    "is_ours",
    "remove",
    "why_not",
]


def installed(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that we installed on this module, or None."""
    return next((f for _, _, f in forward_slots(module) if is_ours(f)), None)


def why_not(module: nn.Module) -> str | None:
    """Why the forward of this module cannot be replaced, or None if it can."""
    slots = list(forward_slots(module))
    if not slots:
        return None
    for _, _, forward in slots:
        if _is_own(module, forward):
            return None
        if is_ours(forward):
            usual = class_forward(module, forward.__func__.__wrapped__) is type(module).forward
            return None if usual else "a hook calls a forward that its class no longer has"
    return "its forward was already replaced by something else"


def install(module: nn.Module, function: Callable[..., Any]) -> None:
    """Make `function(module, ...)` the innermost forward."""
    forward = MethodType(function, module)
    found = [slot for slot in forward_slots(module) if is_ours(slot[2]) or _is_own(module, slot[2])]
    for holder, name, _ in found:
        _set(holder, name, forward)
    if not found and "forward" not in module.__dict__:  # a forward that others set is kept
        module.__dict__["forward"] = forward
    elif not found:
        return
    if type(module).forward is not getattr(function, "__wrapped__", None):
        module.__dict__.setdefault(CLASS_FORWARD, Held(type(module).forward))


# attribute of a module whose class was patched: the forward that the class had when last seen
CLASS_FORWARD = "_kernelwright_class_forward"


def class_forward(module: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
    """The forward that a module would have without ours: that of its class now. If others have
    wrapped ours since, it is the one that the class had then, because without ours their wrapper
    would hold that one. `own` is that of the class when ours was made."""
    names = module.__dict__
    if not is_ours(names.get("forward")):
        held = names.get(CLASS_FORWARD)
        return own if held is None or held.forward is None else held.forward
    found = type(module).forward
    if found is not own or CLASS_FORWARD in names:
        names[CLASS_FORWARD] = Held(found)
    return found


class Held:
    """A forward that copying a module copies along, and pickling it drops."""

    __slots__ = ("forward",)

    def __init__(self, forward: Callable[..., Any] | None) -> None:
        self.forward = forward

    def __deepcopy__(self, memo: Any) -> Held:
        return self

    def __reduce__(self) -> tuple[type[Held], tuple[None]]:
        return Held, (None,)


def remove(module: nn.Module) -> bool:
    """Restore the forward of the class; True if one of ours was installed."""
    found = False
    for holder, name, forward in list(forward_slots(module)):
        if not is_ours(forward):
            continue
        found = True
        if holder is module.__dict__ and name == "forward":
            del holder["forward"]
        else:
            own = class_forward(module, forward.__func__.__wrapped__)
            _set(holder, name, MethodType(own, module))
    if found:  # otherwise others have wrapped ours, and may still call it
        module.__dict__.pop(CLASS_FORWARD, None)
    return found


def _is_own(module: nn.Module, forward: Any) -> bool:
    """Whether this is the forward of the class, bound to the module, as hooks keep it."""
    return (
        isinstance(forward, MethodType)
        and forward.__self__ is module
        and forward.__func__ is type(module).forward
    )


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)
