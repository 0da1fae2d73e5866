"""Checks of what every op promises, for tests and for `kernelwright check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..ops.op import Composite, Op

__all__ = ["op_tests"]


def op_tests(op: Op | Composite) -> Callable[..., None]:
    """A test function for pytest, with a parameter for each promise of the op.

    Kernels run on the GPU. Without one, Triton's are interpreted and CUDA's do not run;
    `kernelwright check` compiles both.
    """
    import pytest
    import torch

    from .conditions import interpret_without_gpu
    from .promises import Promise, promises

    interpret_without_gpu()
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    every = [(f"{d}: {p.name}", p) for d in devices for p in promises(op, d)]

    @pytest.mark.parametrize("promise", [pytest.param(p, id=name) for name, p in every])
    def test(promise: Promise) -> None:
        why = promise.broken()
        assert why is None, why

    return test
