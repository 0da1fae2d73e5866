"""What kernels are checked under: no GPU needed, and memory that shows if it was not written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def interpret_without_gpu() -> None:
    """Have Triton interpret kernels where there is no GPU. Triton reads this when it is imported,
    so before that."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that torch.empty and its kin hand out is full of NaN: an output element that a kernel
    leaves unwritten cannot pass for a right one."""
    before = torch.are_deterministic_algorithms_enabled()
    # PyTorch fills new memory in this mode only; warn_only keeps it from refusing anything
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def rounding_interpreter() -> Iterator[None]:
    """Triton's interpreter cuts float32 down to bfloat16 where a GPU rounds to nearest: round, so
    that kernels are held to the bar by what they do on a GPU."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    cut = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return cut(data, source, target, mode)
        rounded = torch.from_numpy(data.copy()).to(torch.bfloat16)
        return rounded.view(torch.uint16).numpy().reshape(data.shape)

    interpreter._convert_float = convert
    try:
        yield
    finally:
        interpreter._convert_float = cut
