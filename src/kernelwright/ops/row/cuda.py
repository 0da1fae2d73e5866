"""Launch choices of the CUDA row kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ...backends import Unsupported
from ...backends.cuda import TYPES, CudaLaunch
from ..rows import vector_width
from . import RowCall

if TYPE_CHECKING:
    from ..op import Call

# Threads a row in free order, by row width, tuned on H200 at 648720x128, 2x2688x2048 and
# 4608x3072: 16 to 24 elements a thread. A warp a row needs no barrier but has so many rows in flight
# that loads, sums and stores of all of them fall together (15.3 against 13.3 us at 5376x2048).
FREE_THREADS = ((64, 8), (128, 16), (512, 32), (1024, 64), (6144, 128), (16384, 256))
BITS = {"residual": 1, "gate": 2, "weight": 4, "bias": 8, "scale": 16, "shift": 32, "out_gate": 64}
NORMED = 128
MODULATION = ("gate", "scale", "shift", "out_gate")


def plan(row: RowCall, call: Call) -> CudaLaunch:
    rows = row.rows()
    sizes, strides = rows.padded()
    width, dtype = row.width, row.x.dtype
    norm, rounding, threads, vector, factor = (
        exact_order(row, call.exact, rows.count) if call.exact else free_order(row)
    )
    flat = [s for place in strides for s in place]
    itemsize = dtype.itemsize
    types = (dtype, row.dtype("weight", "bias"), row.dtype(*MODULATION))
    if vector == 0:
        # by the widest operand: a float32 vector of 8 would be two half-used accesses
        vector = vector_width(width, max(t.itemsize for t in types), call.alignment, flat)
        threads = free_threads(width, vector)
    elif vector_width(width, itemsize, call.alignment, flat) < vector:
        raise Unsupported(
            f"exact order needs rows that start on {vector * itemsize} bytes, "
            f"as PyTorch's vectorised kernel does"
        )
    block = max(128, threads)
    each = rows_each(row, rows.count, threads)
    per_block = block // threads * each
    parts = sum(bit for part, bit in BITS.items() if row.has(part))
    parts |= NORMED if row.has("y") else 0
    x, w, m = (TYPES[t] for t in types)
    shape = f"kernelwright::Spread<{width}, {vector}, {threads}>"
    return CudaLaunch(
        source="ops/row/cuda.cuh",
        template=f"kernelwright::row<{x}, {w}, {m}, {shape}, {each}, {block}, {len(rows.sizes)}, "
        f"{parts}, kernelwright::{norm}, kernelwright::{rounding}>",
        arguments="kernelwright::RowArgs",
        grid=-(-rows.count // per_block),
        block=block,
        pointers=row.pointers,
        layout="24q3I2f",
        scalars=(*flat, rows.count, sizes[1], sizes[2], row.eps, factor),
        alignment=min(16, vector * itemsize),
    )


def free_order(row: RowCall) -> tuple[str, str, int, int, float]:
    norm = {"rms": "FreeRms", "layer": "FreeLayer", "none": "NoNorm"}[row.norm]
    return norm, "Once", 0, 0, 0.0


def free_threads(width: int, vector: int) -> int:
    ladder = next((t for limit, t in FREE_THREADS if width <= limit), 512)
    # narrow vectors: more threads, so that no thread holds more than 64 elements
    while ladder < 1024 and width > 64 * ladder:
        ladder *= 2
    return min(ladder, 1024)


def rows_each(row: RowCall, rows: int, threads: int) -> int:
    """Rows a thread group takes: two where they share a modulation and there are rows to spare."""
    shares = any(row.has(p) for p in MODULATION)
    held = row.width * row.x.dtype.itemsize <= 48 * threads
    return 2 if shares and held and rows >= 2048 else 1


def exact_order(row: RowCall, chain: str, rows: int) -> tuple[str, str, int, int, float]:
    """Norm, rounding, threads a row, vector width and mean factor that equal the eager chain."""
    width, dtype = row.width, row.x.dtype
    step = torch.float32 if chain == "wan" else dtype
    rounding = f"Each<{TYPES[step]}>"
    modulation = row.dtype(*MODULATION)
    if chain != "wan" and modulation != dtype:
        raise Unsupported(f"eager would promote {dtype} rows by {modulation} modulation")
    weight = row.dtype("weight", "bias")
    if weight != dtype and chain != "wan":
        raise Unsupported(f"eager would promote {dtype} rows by {weight} weights")
    if row.norm == "none":
        return "NoNorm", rounding, 0, 0, 0.0
    if row.norm == "rms" and row.has("bias"):
        raise Unsupported("an rms norm with bias has no exact kernel")
    if row.norm == "rms" and chain in ("diffusers", "transformers"):
        threads, vector, norm = mean_threads(width, rows)
        factor = np.float32(rows) / np.float32(rows * width)
        return norm, rounding, threads, vector, float(factor)
    if width % 4:
        raise Unsupported(f"width {width} is no multiple of 4: PyTorch sums it in another order")
    norm = {"rms": "TorchRms", "layer": "TorchLayer"}[row.norm]
    return norm, rounding, played_threads(width), 4, 0.0


def mean_block(width: int, rows: int) -> tuple[int, int]:
    """The block width of at::mean over contiguous float32 rows, and its vector width.

    From setReduceConfig in ATen/native/cuda/Reduce.cuh: 512 threads are split between the rows and
    the row, the row taking what few rows leave.
    """
    if width >= 8192 or width < 32 or (width >= 128 and width % 4):
        raise Unsupported(f"at::mean sums rows of {width} in an order that has no kernel here")
    vector = 4 if width >= 128 else 1
    along = min(_power_of_two(width // vector), 512)
    height = min(_power_of_two(rows), 512 // min(along, 32), 512)
    return min(along, 512 // height), vector


def mean_threads(width: int, rows: int) -> tuple[int, int, str]:
    """Threads, vector width and norm that sum as at::mean does."""
    block, vector = mean_block(width, rows)
    threads = 128 if block == 32 and width >= 512 else block
    return threads, vector, f"MeanRms<{block}>"


def played_threads(width: int) -> int:
    """Threads that play the 128 of PyTorch's row kernels; fewer where a row has fewer vectors."""
    vectors = width // 4
    if vectors <= 32:
        return max(8, _power_of_two(2 * vectors - 1))
    return 32 if vectors < 128 else 128


def _power_of_two(n: int) -> int:
    """The largest power of two up to n."""
    return 1 << (n.bit_length() - 1)


