"""Whether autograd keeps a record of a call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def autograd_records() -> bool:
    """Whether autograd keeps a record at all; in inference mode it does not."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def gives_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a gradient is wanted of an input."""
    return autograd_records() and (
        any(map(_requires_grad, args)) or any(map(_requires_grad, kwargs.values()))
    )


def records_gradients(holders: Iterable[dict[str, Any]]) -> bool:
    """Whether a gradient is wanted of a parameter in these dicts of modules."""
    if not autograd_records():
        return False
    return any(p is not None and p.requires_grad for held in holders for p in held.values())


def _requires_grad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, (tuple, list)):
        return any(map(_requires_grad, value))
    return isinstance(value, dict) and any(map(_requires_grad, value.values()))
