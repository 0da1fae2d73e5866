"""The three ways to run an injected module: fused, fused inside another one, eager."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..runtime.sites import EMPTY, MODULE_FIELDS, Forward, declined, eagerly, mode, module_fields
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
    """Run the new forward, with the sites in `off` eager; modules inside it need no check."""
    now, noting = mode, mode.notes is not None
    before = module_fields(now)
    now.inside, now.members, now.excluded = True, record.members, record.excluded
    now.adapted, now.cache_scope, now.owner = record.adapted, (record.serial, key), id(module)
    now.off_inside = off
    now.off = off.setdefault(id(module), {}) if noting else off.get(id(module), EMPTY)
    try:
        return fused(module, *args, **kwargs)
    finally:
        now.__dict__.update(zip(MODULE_FIELDS, before, strict=True))


def run_nested(module: nn.Module, fused: Forward, eager: Forward, args: Any, kwargs: Any) -> Any:
    """Run an injected module that is called from a fused forward."""
    if mode.excluded and id(module) in mode.excluded:
        declined("forward", mode.excluded[id(module)])
        return eager(module, *args, **kwargs)
    before, inside = mode.off, mode.off_inside
    if mode.notes is not None:
        mode.off = inside.setdefault(id(module), {})  # type: ignore[attr-defined]
    else:
        mode.off = inside.get(id(module), EMPTY) if inside else EMPTY
    try:
        return fused(module, *args, **kwargs)
    finally:
        mode.off = before


def run_eager(module: nn.Module, eager: Forward, args: Any, kwargs: Any) -> Any:
    with eagerly():
        return eager(module, *args, **kwargs)
