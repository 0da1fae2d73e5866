"""Calls that PyTorch transforms: torch.func, and the tangents of forward-mode differentiation.

A kernel sees memory, and a tangent or a level of torch.func lies beside it. Such calls run the
op's steps in plain PyTorch, which knows how to transform each of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# whether a torch.func transform (grad, vmap, jvp, ...) surrounds this call
in_functorch = torch._C._are_functorch_transforms_active


def transformed(values: Iterable[Any]) -> bool:
    """Whether torch.func surrounds a call with these arguments, or one of them has a tangent."""
    if in_functorch():
        return True
    return forward_ad._current_level >= 0 and any(
        isinstance(v, Tensor) and forward_ad.unpack_dual(v).tangent is not None for v in values
    )


def refuse_kernels(op: str, backend: str) -> None:
    """A backend that was named is taken or refused, and a kernel cannot be transformed."""
    if backend not in ("auto", "torch"):
        raise RuntimeError(
            f"{op}: backend {backend!r} has no kernel for torch.func or forward-mode tangents; "
            f"leave backend out, or take 'torch', which PyTorch can transform"
        )
