"""The order in which a row is summed, and how many threads that takes.

In free order the kernel may choose. The other orders are PyTorch's own; `ways` says which of them
the installed one has.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import gcd

from ...backends import Unsupported
from .. import ways

# (width up to, threads per row) in free order. Tuned on H200 at 2x2688x2048, 4608x3072, 4096x4096
# and 32760x1536, where 64, 128 and 256 were tried; the other steps follow from 8 to 24 elements per
# thread. One warp per row needs no barrier, but so many rows are then in flight that their loads,
# sums and stores coincide (15.3 against 13.2 us at 5376x2048). `free_threads` halves the threads
# where only the half divides a row evenly: 16.5 against 18.8 us for adaln_layernorm at 2x4096x1536.
FREE_THREADS = ((64, 8), (128, 16), (512, 32), (1024, 64), (6144, 128), (16384, 256))
# without a norm no thread waits for others: one vector per thread (17.6 against 22.9 us for
# gated_residual at 2x2688x2048 on H200)
PLAIN_THREADS = 256


@dataclass(frozen=True)
class Order:
    """The norm's name in norms.cuh, threads per row, elements per vector (0: as many as fit), the
    float32 factor by which at::mean scales its sum, and the threads that it gives a row."""

    norm: str
    threads: int = 0
    vector: int = 0
    factor: float = 0.0
    block: int = 0


def free_threads(width: int, vector: int, normed: bool = True) -> int:
    """Threads that share a row when the order is free."""
    if not normed:
        return max(8, min(PLAIN_THREADS, _power_of_two(max(1, width // vector))))
    threads = next((t for limit, t in FREE_THREADS if width <= limit), 512)
    # more threads where one would hold too much: over 64 elements, or over 16 if each is loaded by
    # itself and so needs an address
    most = 64 if vector > 1 else 16
    while threads < 1024 and width > most * threads:
        threads *= 2
    vectors, half = width // vector, threads // 2
    evenly = vectors % threads and vectors % half == 0
    return half if evenly and 1024 <= width <= 24 * half else threads


def eager_mean_order(width: int, rows: int, room: int) -> Order:
    """`mean_order`, if the installed PyTorch has it."""
    ways.way("at::mean")
    return mean_order(width, rows, room)


def mean_order(width: int, rows: int, room: int) -> Order:
    """x.float().pow(2).mean(-1), as in RMSNorm of diffusers and transformers.

    at::mean over contiguous float32 rows divides 512 threads among several rows; with few rows,
    each gets more threads (setReduceConfig in ATen/native/cuda/Reduce.cuh). `room` is the widest
    vector that the row's alignment allows.
    """
    if width >= 8192 or width < 32 or (width >= 128 and width % 4):
        raise Unsupported(f"at::mean sums rows of {width} in an order that has no kernel here")
    vector = 4 if width >= 128 else 1
    along = min(_power_of_two(width // vector), 512)
    height = min(_power_of_two(rows), 512 // min(along, 32))
    block = min(along, 512 // height)
    threads = 128 if block == 32 and width >= 512 else block
    if block == 32 and width in (64, 128) and room >= 8:
        threads, vector = width // 8, 8
    factor = _float32(_float32(rows) / _float32(rows * width))
    return Order(f"MeanRms<{block}>", threads, vector, factor, block)


def rms_order(width: int, itemsize: int, room: int) -> Order:
    """F.rms_norm of rows whose elements have so many bytes."""
    if ways.way("F.rms_norm") == ways.QUACK:
        return quack_order(width, itemsize)
    return aten_order(width, "TorchRms", room)


def layer_order(width: int, room: int) -> Order:
    """F.layer_norm."""
    ways.way("F.layer_norm")
    return aten_order(width, "TorchLayer", room)


def gradient_order(norm: str, width: int, room: int) -> Order:
    """The sums of the gradient of F.layer_norm or F.rms_norm."""
    if ways.way(norm) != ways.ATEN:
        raise Unsupported(f"the gradient of {norm} by {ways.way(norm)}")
    ways.way(f"the gradient of {norm}")
    return aten_order(width, "TorchSum", room)


# (width up to, threads per row) of QuACK's kernel; wider rows are spread over several blocks
QUACK_THREADS = ((64, 8), (128, 16), (3072, 32), (6144, 64), (16384, 128))


def quack_order(width: int, itemsize: int) -> Order:
    """F.rms_norm by QuACK's kernel: vectors of 16 bytes, or as many as divide a row. It leaves rows
    with an odd number of 16-bit elements to ATen; other widths were not compared."""
    vector = gcd(width, 16 // itemsize)
    if width % 4:
        raise Unsupported(f"rows of {width}, no multiple of 4")
    threads = next((t for limit, t in QUACK_THREADS if width <= limit), 0)
    if not threads:
        raise Unsupported(f"QuACK spreads rows of {width} over several blocks")
    return Order("QuackRms", threads, vector)


def aten_order(width: int, norm: str, room: int) -> Order:
    """F.rms_norm ("TorchRms"), F.layer_norm ("TorchLayer") and their gradients ("TorchSum"): ATen
    uses 128 threads and vectors of four; where a row has fewer vectors, fewer threads give the same
    order."""
    if width % 4:
        raise Unsupported(f"width {width} is no multiple of 4: PyTorch sums it in another order")
    vectors = width // 4
    if width in (64, 128) and room >= 8:
        return Order(norm, width // 8, 8)
    if vectors <= 32:
        return Order(norm, max(8, _power_of_two(2 * vectors - 1)), 4)
    return Order(norm, 32 if vectors < 128 else 128, 4)


def _float32(value: float) -> float:
    """Rounded to float32. A float64 quotient of two float32 values rounds to float32's quotient."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _power_of_two(n: int) -> int:
    """The largest power of two up to n."""
    return 1 << (n.bit_length() - 1)
