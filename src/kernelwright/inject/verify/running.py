"""The three ways to run an injected module: fused, fused inside another one, eager."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..runtime.sites import HERE, NOTHING, Forward, current, declined, eagerly
from .verdicts import ModuleRecord


def run_fused(
    module: nn.Module,
    record: ModuleRecord,
    key: Any,
    off: dict[int, dict[str, str]],
    fused: Forward,
    args: Any,
    kwargs: Any,
) -> Any:
    """The new forward, with the sites of `off` eager; modules inside it need no check."""
    now, noting = current, current.notes is not None
    before = {name: getattr(now, name) for name in HERE}
    now.inside, now.off_inside, now.stays, now.members = True, off, record.stays, record.members
    now.adapted, now.made_under = record.adapted, (record.serial, key)
    now.off = off.setdefault(id(module), {}) if noting else off.get(id(module), NOTHING)
    try:
        return fused(module, *args, **kwargs)
    finally:
        for name, value in before.items():
            setattr(now, name, value)


def run_nested(module: nn.Module, fused: Forward, eager: Forward, args: Any, kwargs: Any) -> Any:
    """A forward of ours that another one of ours calls."""
    if current.stays and id(module) in current.stays:
        declined("forward", current.stays[id(module)])
        return eager(module, *args, **kwargs)
    before, inside = current.off, current.off_inside
    if current.notes is not None:
        current.off = inside.setdefault(id(module), {})  # type: ignore[attr-defined]
    else:
        current.off = inside.get(id(module), NOTHING) if inside else NOTHING
    try:
        return fused(module, *args, **kwargs)
    finally:
        current.off = before


def run_eager(module: nn.Module, eager: Forward, args: Any, kwargs: Any) -> Any:
    with eagerly():
        return eager(module, *args, **kwargs)
