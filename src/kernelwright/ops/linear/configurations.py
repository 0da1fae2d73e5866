"""Configurations of Hopper's products that cuBLASLt has and names for some products only.

It names those that it holds to be fast, eight of some hundred. Where a GPU is at the limit of its
power others may be faster: on an H200 tiles of 128 x 128 took 256 in place of 274 us for a product
of 5376 x 2048 to 8192 (bias, bfloat16), 223 in place of 243 for 8192 x 1536 to 6144, and 1308 in
place of 1436 for 32760 x 1536 to 8960, with the same bits.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t
from dataclasses import astuple, dataclass
from typing import Any

# attributes of an algorithm, as cublasLt.h numbers them; the last has 16 bits, the others 32
ALGORITHM, TILE, OPTION, CLUSTER = 0, 1, 5, 8
HOPPER = 66  # the algorithm that the configurations below are of


@dataclass(frozen=True)
class Tried:
    """A cuBLASLt, by what cublasLtGetVersion returns, and a GPU that they were tried on."""

    version: int
    capability: tuple[int, int]
    where: str

    def __str__(self) -> str:
        return _on(self.version, self.capability)


# the numbers are documented nowhere and may mean something else in any other build: with some of
# them cuBLASLt was seen to divide by zero, which ends the process. so they are asked for where
# they were tried, and nowhere else. tests/gpu/test_algorithms.py tries them in a process of its own
TRIED = (Tried(130_100, (9, 0), "H200, torch 2.11.0+cu130, nvidia-cublas 13.1.0.3"),)


@dataclass(frozen=True)
class Configuration:
    """By cublasLt.h's own numbers; what an option means it does not say."""

    tile: int
    option: int
    cluster: int


# the fastest five of 34 that it names for one or another product of LTX-Video, FLUX, SD3.5, Wan and
# Llama. only such are asked for: those that it divided by zero with were others
MORE = (
    Configuration(tile=20, option=1, cluster=3),  # 128 x 128, in pairs
    Configuration(tile=165, option=0, cluster=3),
    Configuration(tile=165, option=2, cluster=5),
    Configuration(tile=28, option=0, cluster=3),  # 96 x 128, in pairs
    Configuration(tile=500, option=7, cluster=5),
)


def problem(functions: Any, capability: tuple[int, int]) -> str | None:
    """Why this cuBLASLt may not be asked for them on a GPU of this capability, or None."""
    ask = getattr(functions, "cublasLtGetVersion", None)
    if ask is None:
        return "this cuBLASLt does not say which version it is"
    version = ask()
    if any((t.version, t.capability) == (version, capability) for t in TRIED):
        return None
    tried = ", ".join(map(str, TRIED))
    return f"{_on(version, capability)} was not tried, {tried} was"


def _on(version: int, capability: tuple[int, int]) -> str:
    """130100 is version 13.1.0, as cublas_api.h puts it together."""
    parts = version // 10_000, version // 100 % 100, version % 100
    return "cuBLASLt {}.{}.{} on capability {}.{}".format(*parts, *capability)


def of(functions: Any, found: ctypes.Structure) -> Configuration | None:
    """That of an algorithm that was found, or None if it is not Hopper's."""
    if _get(functions, found, ALGORITHM) != HOPPER:
        return None
    parts = [_get(functions, found, a) for a in (TILE, OPTION, CLUSTER)]
    return None if None in parts else Configuration(*parts)  # type: ignore[arg-type]


def changed(functions: Any, found: ctypes.Structure, to: Configuration) -> ctypes.Structure | None:
    """A copy of what was found, with another configuration; None if it does not take that."""
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
    number, written = _kind(attribute)(), c_size_t()
    size = c_size_t(ctypes.sizeof(number))
    status = functions.cublasLtMatmulAlgoConfigGetAttribute(
        byref(found), attribute, byref(number), size, byref(written)
    )
    return None if status else number.value


def _kind(attribute: int) -> Any:
    return ctypes.c_uint16 if attribute == CLUSTER else ctypes.c_uint32
