"""Where the forward of a module lives.

A plain module has it on its class. accelerate and diffusers wrap it on the instance and keep the
inner one in a slot of their own (`_old_forward`, a hook's function reference). We always change
the innermost, so hooks keep working whichever came first, and undo finds ours wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from ...library_internals import forward_slots
from ..state.hooks import MARK, is_ours
from ..state.hooks import is_hooked as hooked

__all__ = ["MARK", "class_forward", "current", "hooked", "is_ours", "put", "remove", "why_not"]


def current(module: nn.Module) -> Callable[..., Any] | None:
    """Our forward of this module, if it has one."""
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
            return None if usual else "a hook calls another forward than its class has now"
    return "its forward was already replaced by something else"


def put(module: nn.Module, function: Callable[..., Any]) -> None:
    """Make `function(module, ...)` the innermost forward."""
    forward = MethodType(function, module)
    found = [slot for slot in forward_slots(module) if is_ours(slot[2]) or _is_own(module, slot[2])]
    for holder, name, _ in found:
        _write(holder, name, forward)
    if not found and "forward" not in module.__dict__:  # what somebody put there since stays
        module.__dict__["forward"] = forward
    elif not found:
        return
    if type(module).forward is not getattr(function, "__wrapped__", None):
        module.__dict__.setdefault(LAST, Held(type(module).forward))


LAST = "_kernelwright_class_forward"  # set on a module whose class was given another forward


def class_forward(module: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
    """The forward that a module would have without ours: that of its class, as it is now. But what
    somebody has put around ours since would hold on to the one that the class had at that time.
    `own` is that of the class when ours was made."""
    names = module.__dict__
    if not is_ours(names.get("forward")):
        held = names.get(LAST)
        return own if held is None or held.forward is None else held.forward
    found = type(module).forward
    if found is not own or LAST in names:
        names[LAST] = Held(found)
    return found


class Held:
    """A forward that a copy of its module holds too, and a pickled one does not."""

    __slots__ = ("forward",)

    def __init__(self, forward: Callable[..., Any] | None) -> None:
        self.forward = forward

    def __deepcopy__(self, memo: Any) -> Held:
        return self

    def __reduce__(self) -> tuple[type[Held], tuple[None]]:
        return Held, (None,)


def remove(module: nn.Module) -> bool:
    """Bring back the forward of the class; True if there was one of ours."""
    found = False
    for holder, name, forward in list(forward_slots(module)):
        if not is_ours(forward):
            continue
        found = True
        if holder is module.__dict__ and name == "forward":
            del holder["forward"]
        else:
            own = class_forward(module, forward.__func__.__wrapped__)
            _write(holder, name, MethodType(own, module))
    if found:  # or else somebody has put another forward around ours, and may go on calling it
        module.__dict__.pop(LAST, None)
    return found


def _is_own(module: nn.Module, forward: Any) -> bool:
    """The forward of the class, bound to the module, as hooks keep it."""
    return (
        isinstance(forward, MethodType)
        and forward.__self__ is module
        and forward.__func__ is type(module).forward
    )


def _write(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)
