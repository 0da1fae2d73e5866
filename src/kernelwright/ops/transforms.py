"""Calls under torch.func, or with the tangents of forward-mode differentiation.

A kernel reads only memory, which holds neither tangents nor torch.func's levels. Such calls run the
op as PyTorch ops, each of which PyTorch can transform.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..backends.torch_internals import forward_ad, in_forward_ad, in_functorch


def transformed(values: Iterable[Any]) -> bool:
    """Whether torch.func surrounds a call with these arguments, or one of them has a tangent."""
    if in_functorch():
        return True
    return in_forward_ad() and any(
        isinstance(v, Tensor) and forward_ad.unpack_dual(v).tangent is not None for v in values
    )


def refuse_kernels(op: str, backend: str) -> None:
    """Raise if the caller named a kernel backend: kernels cannot be transformed."""
    if backend not in ("auto", "torch"):
        raise RuntimeError(
            f"{op}: backend {backend!r} has no kernel for torch.func or forward-mode tangents; "
            f"leave backend out, or take 'torch', which PyTorch can transform"
        )
