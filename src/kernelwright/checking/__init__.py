"""Checks of what every op promises, for tests and for `kernelwright check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..ops.op import Composite, Op

__all__ = ["op_tests"]


def op_tests(op: Op | Composite) -> Callable[..., None]:
    """A test function for pytest, with a parameter for each promise of the op.

    Kernels run on the GPU. Without one, Triton's are interpreted and CUDA's are compiled by g++ and
    emulated, as `kernelwright check` does; that also compiles both for all GPUs.
    """
    import pytest
    import torch

    from ..ops.op import Op
    from .conditions import interpret_without_gpu
    from .emulator import WhenAsked, problem
    from .promises import Promise, promises

    interpret_without_gpu()
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    emulator, every = None, []
    if "cuda" in op.backends and isinstance(op, Op) and devices == ("cpu",):
        if why := problem():
            left_out = pytest.mark.skip(reason=f"no GPU, and cuda is not emulated: {why}")
            every.append(pytest.param(None, id="cpu: cuda emulated", marks=left_out))
        else:
            emulator = WhenAsked(op)
    for device in devices:
        found = promises(op, device, emulator=emulator if device == "cpu" else None)
        every += [pytest.param(p, id=f"{device}: {p.name}") for p in found]

    @pytest.mark.parametrize("promise", every)
    def test(promise: Promise) -> None:
        why = promise.broken()
        assert why is None, why

    return test
