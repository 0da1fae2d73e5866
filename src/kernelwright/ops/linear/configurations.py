"""Configurations of Hopper GEMMs in cuBLASLt: those worth trying beside the ones that its heuristic
returns, and how much each slows down when the GPU reaches its power limit.

The heuristic returns about eight of some hundred, those that it expects to be fast on a cool GPU.
A model keeps the GPU at its power limit, where the time of a GEMM follows its energy: on an H200
tiles of 128 x 128 (20) took 3772 instead of 4116 us for 35552 x 3072 to 12288 (bias, bfloat16) in a
few readings, but 4053 instead of 4083 when each ran alone for 0.35 s, where tile 29 took 3930.
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


# the time of each at the GPU's power limit over its time in a few readings, relative to the first:
# least squares over 29 GEMMs of FLUX, FLUX.2, Wan 2.2 14B, CogVideoX, Phi-4, Llama and LTX-Video,
# 6 of them of a backward (bfloat16, random data), each alone for 0.3 s at 1,290 to 1,860 MHz on
# an H200 of 700 W; those that were timed for four GEMMs or more. The residual is 1.7%
POWER = {
    Configuration(tile=500, option=7, cluster=5): 1.0,
    Configuration(tile=248, option=7, cluster=5): 0.994,
    Configuration(tile=24, option=7, cluster=5): 0.996,
    Configuration(tile=421, option=5, cluster=3): 1.0,
    Configuration(tile=23, option=4, cluster=3): 1.003,
    Configuration(tile=209, option=6, cluster=5): 1.003,
    Configuration(tile=20, option=3, cluster=7): 1.006,
    Configuration(tile=465, option=7, cluster=5): 1.008,
    Configuration(tile=414, option=5, cluster=3): 1.009,
    Configuration(tile=209, option=4, cluster=3): 1.013,
    Configuration(tile=465, option=5, cluster=3): 1.017,
    Configuration(tile=31, option=7, cluster=5): 1.022,
    Configuration(tile=24, option=5, cluster=3): 1.024,
    Configuration(tile=547, option=7, cluster=5): 1.028,
    Configuration(tile=201, option=2, cluster=5): 1.031,
    Configuration(tile=29, option=1, cluster=3): 1.032,
    Configuration(tile=495, option=7, cluster=5): 1.036,
    Configuration(tile=29, option=5, cluster=3): 1.037,
    Configuration(tile=29, option=3, cluster=5): 1.038,
    Configuration(tile=29, option=7, cluster=5): 1.038,
    Configuration(tile=32, option=4, cluster=3): 1.038,
    Configuration(tile=197, option=2, cluster=5): 1.038,
    Configuration(tile=201, option=6, cluster=5): 1.04,
    Configuration(tile=197, option=6, cluster=5): 1.043,
    Configuration(tile=20, option=3, cluster=5): 1.045,
    Configuration(tile=184, option=2, cluster=5): 1.045,
    Configuration(tile=184, option=6, cluster=5): 1.053,
    Configuration(tile=20, option=1, cluster=3): 1.059,
    Configuration(tile=31, option=5, cluster=3): 1.07,
    Configuration(tile=165, option=0, cluster=3): 1.073,
    Configuration(tile=28, option=0, cluster=3): 1.075,
    Configuration(tile=165, option=2, cluster=5): 1.079,
}
MEDIAN_POWER = 1.03  # of one that was not measured

# the fastest of these at the power limit, by the same readings. The heuristic returns each for some
# GEMM of those models; configurations that made cuBLASLt divide by zero are never returned
MORE = (
    Configuration(tile=500, option=7, cluster=5),
    Configuration(tile=29, option=1, cluster=3),
    Configuration(tile=414, option=5, cluster=3),
    Configuration(tile=24, option=7, cluster=5),
)


def power(configuration: Configuration | None) -> float:
    """The time of a kernel at the GPU's power limit over its time in a few readings, relative to
    the configuration that is first in POWER."""
    return MEDIAN_POWER if configuration is None else POWER.get(configuration, MEDIAN_POWER)


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
