"""Where the forward of a module lives.

A plain module has it on its class. accelerate and diffusers wrap it on the instance and keep the
inner one in a slot of their own (`_old_forward`, a hook's function reference). We always change
the innermost, so hooks keep working whichever came first, and undo finds ours wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from torch import nn

from .state import MARK, is_ours
from .state import is_hooked as hooked

__all__ = ["MARK", "current", "hooked", "is_ours", "put", "remove", "why_not"]


def current(module: nn.Module) -> Callable[..., Any] | None:
    """Our forward of this module, if it has one."""
    return next((f for _, _, f in _slots(module) if is_ours(f)), None)


def why_not(module: nn.Module) -> str | None:
    """Why the forward of this module cannot be replaced, or None if it can."""
    slots = list(_slots(module))
    if not slots or any(is_ours(f) or _is_own(module, f) for _, _, f in slots):
        return None
    return "its forward was already replaced by something else"


def put(module: nn.Module, function: Callable[..., Any]) -> None:
    """Make `function(module, ...)` the innermost forward."""
    forward = MethodType(function, module)
    slots = [
        (holder, name) for holder, name, f in _slots(module) if is_ours(f) or _is_own(module, f)
    ]
    for holder, name in slots:
        _write(holder, name, forward)
    if not slots and "forward" not in module.__dict__:  # what somebody put there since stays
        module.__dict__["forward"] = forward


def remove(module: nn.Module) -> bool:
    """Bring back the forward of the class; True if there was one of ours."""
    found = False
    for holder, name, forward in list(_slots(module)):
        if not is_ours(forward):
            continue
        found = True
        if holder is module.__dict__ and name == "forward":
            del holder["forward"]
        else:
            _write(holder, name, MethodType(type(module).forward, module))
    return found


def _is_own(module: nn.Module, forward: Any) -> bool:
    """The forward of the class, bound to the module, as hooks keep it."""
    return (
        isinstance(forward, MethodType)
        and forward.__self__ is module
        and forward.__func__ is type(module).forward
    )


def _slots(module: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """(holder, name, value) of every place that holds a forward of this module."""
    for name in ("forward", "_old_forward"):
        if name in module.__dict__:
            yield module.__dict__, name, module.__dict__[name]
    registry = module.__dict__.get("_diffusers_hook")
    for reference in getattr(registry, "_fn_refs", ()):
        for name in ("forward", "original_forward"):
            if (value := getattr(reference, name, None)) is not None:
                yield reference, name, value


def _write(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)
