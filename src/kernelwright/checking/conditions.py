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
    """Have Triton's interpreter round float32 to bfloat16 and to fp8 as a GPU does: it truncates to
    the first, and forgets to carry in the second."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    cut = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target not in (tl.bfloat16, tl.float8e4nv):
            return cut(data, source, target, mode)
        values = torch.from_numpy(data.copy())
        if target == tl.bfloat16:
            rounded = values.to(torch.bfloat16).view(torch.uint16)
        else:
            rounded = values.to(torch.float8_e4m3fn).view(torch.uint8)
        return rounded.numpy().reshape(data.shape)

    interpreter._convert_float = convert
    try:
        yield
    finally:
        interpreter._convert_float = cut
