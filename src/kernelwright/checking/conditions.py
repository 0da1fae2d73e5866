"""The conditions of a check: Triton interpreted where there is no GPU, new memory full of NaN."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def interpret_without_gpu() -> None:
    """Have Triton interpret kernels where there is no GPU. Call it before Triton is imported."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill the memory of torch.empty with NaN: an output element that a kernel does not write
    cannot be right by chance."""
    before = torch.are_deterministic_algorithms_enabled()
    # PyTorch fills new memory in this mode only; warn_only: it must not refuse ops
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def rounding_interpreter() -> Iterator[None]:
    """Have Triton's interpreter round float32 to bfloat16 as a GPU does; it truncates."""
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
