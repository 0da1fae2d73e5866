"""Configurations of Hopper GEMMs that cuBLASLt has, but whose heuristic does not always return.

It returns those that it expects to be fast, eight of some hundred. On a GPU at its power limit
others may be faster: on an H200 tiles of 128 x 128 took 256 instead of 274 us for 5376 x 2048 to
8192 (bias, bfloat16), 223 instead of 243 for 8192 x 1536 to 6144, and 1308 instead of 1436 for
32760 x 1536 to 8960, with the same bits.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t
from dataclasses import astuple, dataclass
from typing import Any

# attributes of an algorithm, as cublasLt.h numbers them; the last has 16 bits, the others 32
ALGORITHM, TILE, OPTION, CLUSTER = 0, 1, 5, 8
HOPPER = 66  # the id of the algorithm that the configurations below belong to


@dataclass(frozen=True)
class Tried:
    """A version, as cublasLtGetVersion returns it, and a GPU on which they were tried."""

    version: int
    capability: tuple[int, int]
    where: str

    def __str__(self) -> str:
        return _on(self.version, self.capability)


# the numbers are undocumented and may mean something else in any other build: some made cuBLASLt
# divide by zero, which ends the process. so they are used only where they were tried;
# tests/gpu/test_algorithms.py tries them in a process of its own
TRIED = (Tried(130_100, (9, 0), "H200, torch 2.11.0+cu130, nvidia-cublas 13.1.0.3"),)


@dataclass(frozen=True)
class Configuration:
    """By the numbers of cublasLt.h, which does not say what an option means."""

    tile: int
    option: int
    cluster: int


# the fastest five of the 34 that the heuristic returns for any GEMM of LTX-Video, FLUX, SD3.5, Wan
# or Llama. those that made it divide by zero are never returned
MORE = (
    Configuration(tile=20, option=1, cluster=3),  # 128 x 128, in pairs
    Configuration(tile=165, option=0, cluster=3),
    Configuration(tile=165, option=2, cluster=5),
    Configuration(tile=28, option=0, cluster=3),  # 96 x 128, in pairs
    Configuration(tile=500, option=7, cluster=5),
)


def problem(functions: Any, capability: tuple[int, int]) -> str | None:
    """Why they cannot be used with this cuBLASLt on a GPU of this capability, or None."""
    ask = getattr(functions, "cublasLtGetVersion", None)
    if ask is None:
        return "this cuBLASLt does not say which version it is"
    version = ask()
    if any((t.version, t.capability) == (version, capability) for t in TRIED):
        return None
    tried = ", ".join(map(str, TRIED))
    return f"{_on(version, capability)} was not tried, {tried} was"


def _on(version: int, capability: tuple[int, int]) -> str:
    """130100 is version 13.1.0, by the formula in cublas_api.h."""
    parts = version // 10_000, version // 100 % 100, version % 100
    return "cuBLASLt {}.{}.{} on capability {}.{}".format(*parts, *capability)


def of(functions: Any, found: ctypes.Structure) -> Configuration | None:
    """The configuration of an algorithm, or None if it is not Hopper's."""
    if _get(functions, found, ALGORITHM) != HOPPER:
        return None
    parts = [_get(functions, found, a) for a in (TILE, OPTION, CLUSTER)]
    return None if None in parts else Configuration(*parts)  # type: ignore[arg-type]


def changed(functions: Any, found: ctypes.Structure, to: Configuration) -> ctypes.Structure | None:
    """A copy of an algorithm with another configuration, or None if cuBLASLt refuses it."""
    copy = type(found).from_buffer_copy(found)
    for attribute, value in zip((TILE, OPTION, CLUSTER), astuple(to), strict=True):
        number = _kind(attribute)(value)
        size = c_size_t(ctypes.sizeof(number))
        if functions.cublasLtMatmulAlgoConfigSetAttribute(
            byref(copy), attribute, byref(number), size
        ):
            return None
    return copy


def _get(functions: Any, found: ctypes.Structure, attribute: int) -> int | None:
    number, size_written = _kind(attribute)(), c_size_t()
    size = c_size_t(ctypes.sizeof(number))
    status = functions.cublasLtMatmulAlgoConfigGetAttribute(
        byref(found), attribute, byref(number), size, byref(size_written)
    )
    return None if status else number.value


def _kind(attribute: int) -> Any:
    return ctypes.c_uint16 if attribute == CLUSTER else ctypes.c_uint32
