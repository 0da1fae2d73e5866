"""Choices of algorithms on disk, beside the compiled kernels: trying all of them takes 60 to 200 ms
for each GEMM of a model, in every process.

cuBLASLt says that an algorithm may be stored and used again by the same version of the library. It
is one launch to compare its bits with PyTorch's, which a process does before it relies on one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

import torch

from ...backends.cache import KernelCache
from ...backends.torch_internals import gemm_switches
from .cublaslt import Found, Library, Shape

# changes with what is kept, and with how choices are made
FORM = "1"
cache: Callable[[], KernelCache] = KernelCache.default


@dataclass(frozen=True)
class Choice:
    """What was chosen for a GEMM: `found`, or PyTorch's algorithm if that is None, and why."""

    why: str
    torch_us: float | None = None
    us: float | None = None
    found: Found | None = None


def key_of(shape: Shape, library: Library, gpu: str) -> str | None:
    """What a choice depends on; None if the library does not say which version it is."""
    ask = getattr(library.functions, "cublasLtGetVersion", None)
    if ask is None:
        return None
    versions = str(ask()), torch.__version__, str(torch.version.cuda)
    return KernelCache.key("gemm", FORM, gpu, *versions, str(gemm_switches()), str(astuple(shape)))


def read(key: str | None) -> Choice | None:
    """The choice of an earlier process, or None."""
    data = None if key is None else cache().read(key, "gemm")
    if data is None:
        return None
    with suppress(ValueError, KeyError, TypeError):
        told: dict[str, Any] = json.loads(data)
        found, algorithm = None, told["algorithm"]
        if algorithm is not None:
            found = Found.from_buffer_copy(bytes.fromhex(algorithm))
        return Choice(told["why"], told["torch_us"], told["us"], found)
    return None


def write(key: str | None, choice: Choice) -> None:
    """Keep a choice for later processes."""
    if key is None:
        return
    algorithm = None if choice.found is None else bytes(choice.found).hex()
    told = {"why": choice.why, "torch_us": choice.torch_us, "us": choice.us}
    cache().write(key, json.dumps({**told, "algorithm": algorithm}).encode(), "gemm")
