"""Finds the fastest cuBLASLt algorithm that gives PyTorch's bits, on a call's own data.

A few readings show its time on a GPU that is not yet at its power limit. A model keeps it there, so
each time is multiplied by what its kernel is known to lose at the limit (`configurations.POWER`).
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...backends.torch_internals import raw_stream as _stream
from . import configurations, kept_choices
from .cublaslt import ALIGNMENT, TYPES, Algorithm, Found, Library, Product, Refused, Shape, load
from .kept_choices import Choice
from .plain import plain_into

# the time to spend on one choice: ten or twenty of them delay a first result unnoticeably. Of long
# GEMMs as long as this many calls take, if that is not too long
MICROSECONDS, CALLS, MOST_MICROSECONDS = 60_000, 27, 200_000
ROUNDS, LEAST_ROUNDS = 5, 2
# smaller gains are within the noise of two readings of one algorithm
GAIN = 1.01
# an operand with a smaller share of non-zeros cannot distinguish summation orders
TELLING = 1 / 16
SAMPLE = 1024  # rows in which non-zeros are counted
PIECE = 2**26  # elements that are compared at once
ROW_BYTES = 16
MISALIGNED = -1


class Way:
    """An algorithm for all GEMMs of one signature."""

    def __init__(self, algorithm: Algorithm, x: Tensor, weight: Tensor) -> None:
        shape = (*x.shape[:-1], weight.shape[0])
        strides = torch.empty(shape, device="meta").stride()
        # torch.empty takes 1.5 times as long
        make = torch.empty_strided
        self.room = functools.partial(make, shape, strides, dtype=x.dtype, device=x.device)
        self.found, self.power = algorithm.found, algorithm.power
        self._launch = algorithm.launch
        self._workspace = algorithm.workspace
        self._device = x.get_device()
        self._one_gpu = torch.cuda.device_count() <= 1

    def into(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> int:
        """Launch the GEMM; returns cuBLASLt's status, 0 for success."""
        # freed on return: whatever reuses the memory runs after this on the same stream
        room = x.new_empty(self._workspace, dtype=torch.uint8) if self._workspace else None
        x_at, weight_at, out_at = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        bias_at = 0 if bias is None else bias.data_ptr()
        if (x_at | weight_at | out_at | bias_at) % ALIGNMENT:
            return MISALIGNED
        room_at = 0 if room is None else room.data_ptr()
        addresses = x_at, weight_at, bias_at, out_at, room_at
        if self._one_gpu:
            return self._launch(*addresses, _stream(self._device))
        with torch.cuda.device_of(x):
            return self._launch(*addresses, _stream(self._device))


@dataclass(frozen=True)
class Decision:
    """What computes the GEMMs of one signature: `way`, or F.linear if that is None, and why. `us`:
    what was read, times what its kernel loses at the GPU's power limit against PyTorch's."""

    product: str
    why: str
    way: Way | None = None
    torch_us: float | None = None
    us: float | None = None

    def __str__(self) -> str:
        if self.us is None or self.way is None:
            return f"{self.product}: PyTorch's algorithm, {self.why}"
        return f"{self.product}: {self.us:.0f} us, {self.torch_us:.0f} by PyTorch's algorithm"


def choose(
    x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, expected: Tensor
) -> Decision:
    """Try every algorithm on this call; `expected` is PyTorch's result."""
    product = _named(x, weight, bias, gelu)
    try:
        with torch.cuda.device_of(x):
            return _fastest(product, x, weight, bias, gelu, expected)
    except Refused as no:
        return Decision(product, str(no))
    except torch.OutOfMemoryError:
        return Decision(product, "there was no memory to try others")
    except RuntimeError as no:
        return Decision(product, f"trying others failed: {str(no).partition(chr(10))[0]}")


def aligned(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the addresses are aligned as cuBLASLt needs them."""
    operands = (x, weight) if bias is None else (x, weight, bias)
    return not any(t.data_ptr() % ALIGNMENT for t in operands)


def _named(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> str:
    outputs, width = weight.shape
    plus = ("" if bias is None else " + bias") + (", GELU" if gelu else "")
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{x.numel() // width} x {width} to {outputs}{plus} in {dtype}"


def _fastest(
    product: str, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, expected: Tensor
) -> Decision:
    shape = _shape(x, weight, bias, gelu, expected)
    bias_at, device = 0 if bias is None else bias.data_ptr(), x.get_device()
    described = Product(_library(device), shape)
    if not (_tells(x) and _tells(weight)):
        raise Refused("it was first asked for with zeros, on which all agree")
    out = torch.empty_like(expected)
    family = _family(shape, device)
    key = kept_choices.key_of(shape, described.library, gpu(device))
    kept = None if _forgotten else kept_choices.read(key)
    if kept is not None:
        way = _as_kept(kept, described, out, x, weight, bias, expected)
        if way is not None or kept.found is None:
            _winners[family] = shape.rows, kept.found
            return Decision(product, kept.why, way, kept.torch_us, kept.us)
    found = _candidates(described, shape, bias_at, device)
    torch_power = described.torch_power(bias_at)
    by_torch = functools.partial(plain_into, out, x, weight, bias, gelu)
    begin = time.perf_counter()
    (once,) = readings([by_torch], 1)
    budget = min(max(MICROSECONDS, CALLS * once), MOST_MICROSECONDS)
    most = int(budget / once / (1 + LEAST_ROUNDS)) - 1
    if most < 1:
        raise Refused("it takes too long to try others")
    ways, failed = [], 0
    for algorithm in found[:most]:
        way = Way(algorithm, x, weight)
        out.fill_(torch.nan)  # overwrite the result of the algorithm before
        if status := way.into(out, x, weight, bias):
            failed = status
        elif _same_bits(out, expected):
            ways.append(way)
    if not ways:
        why = f"none of {len(found[:most])} others gives its bits"
        if failed:
            raise Refused(f"{why}; cublasLtMatmul answered with status {failed}")
        kept_choices.write(key, Choice(why))
        raise Refused(why)
    timed: list[Callable[[], Any]] = [by_torch]
    timed += [functools.partial(way.into, out, x, weight, bias) for way in ways]
    left = budget - (time.perf_counter() - begin) * 1e6
    rounds = min(ROUNDS, int(left / once / len(timed)))
    torch_us, *times = readings(timed, max(LEAST_ROUNDS, rounds))
    at_limit = (us * way.power / torch_power for us, way in zip(times, ways, strict=True))
    us, best = min(zip(at_limit, range(len(ways)), strict=True))
    chosen = Choice("faster", torch_us, us, ways[best].found)
    if us * GAIN > torch_us:
        chosen = Choice(f"none of {len(ways)} others is {GAIN - 1:.0%} faster", torch_us)
    _winners[family] = shape.rows, chosen.found
    kept_choices.write(key, chosen)
    return Decision(product, chosen.why, ways[best] if chosen.found else None, torch_us, chosen.us)


def _as_kept(
    kept: Choice,
    described: Product,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expected: Tensor,
) -> Way | None:
    """The algorithm that an earlier process has chosen, if it has PyTorch's bits here, too."""
    if kept.found is None:
        return None
    for algorithm in described.again(kept.found, 0 if bias is None else bias.data_ptr()):
        way = Way(algorithm, x, weight)
        out.fill_(torch.nan)
        if way.into(out, x, weight, bias) == 0 and _same_bits(out, expected):
            return way
    return None


def _candidates(product: Product, shape: Shape, bias: int, device: int) -> list[Algorithm]:
    """All algorithms; or the winner for a similar number of rows and weights of this shape, so that
    another image size does not try all of them again."""
    rows, found = _winners.get(_family(shape, device), (0, None))
    if not rows <= 2 * shape.rows <= 4 * rows:
        return product.algorithms(bias)
    if found is None:
        raise Refused(f"none was faster for {rows} rows either")
    return product.again(found, bias) or product.algorithms(bias)


def _family(shape: Shape, device: int) -> tuple[Shape, int]:
    return replace(shape, rows=0, x_stride=0), device


_winners: dict[tuple[Shape, int], tuple[int, Found | None]] = {}
_forgotten = False  # whether choices of earlier processes are not read any more


def forget() -> None:
    """Forget which algorithms won, in earlier processes too."""
    global _forgotten
    _forgotten = True
    _winners.clear()


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, expected: Tensor) -> Shape:
    """The GEMM as cuBLASLt describes it; raises Refused if it cannot be described."""
    operands = [x, weight] if bias is None else [x, weight, bias]
    if x.dtype not in TYPES or any(t.dtype != x.dtype for t in operands):
        raise Refused("it takes float16 or bfloat16 throughout")
    if any(t.device != x.device for t in operands):
        raise Refused("its operands lie on several devices")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise Refused("its bias is spread over more than the rows")
    if (bias is not None and bias.stride(0) != 1) or not expected.is_contiguous():
        raise Refused("its rows have gaps")
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError:
        raise Refused("its rows do not lie evenly apart") from None
    (x_stride, x_across), (weight_stride, weight_across) = map(_lies, (rows, weight))
    return Shape(
        rows=len(rows),
        outputs=len(weight),
        width=x.shape[-1],
        x_stride=x_stride,
        weight_stride=weight_stride,
        dtype=x.dtype,
        biased=bias is not None,
        gelu=gelu,
        x_across=x_across,
        weight_across=weight_across,
    )


def _lies(matrix: Tensor) -> tuple[int, bool]:
    """How far apart the rows of a matrix begin; or its columns, if it lies across."""
    across = matrix.stride(1) != 1
    if across and matrix.stride(0) != 1:
        raise Refused("its rows have gaps")
    stride, length = matrix.stride(int(across)), matrix.shape[int(not across)]
    if stride < length or stride * matrix.itemsize % ROW_BYTES:
        raise Refused(f"its rows do not begin at multiples of {ROW_BYTES} bytes")
    return stride, across


def _tells(operand: Tensor) -> bool:
    rows = operand.view(-1, operand.shape[-1])
    some = rows[:: max(1, len(rows) // SAMPLE)]
    return torch.count_nonzero(some).item() >= TELLING * some.numel()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """torch.equal, but for signs of zero and NaN too; in pieces, as it takes a byte per element."""
    pieces = (t.view(torch.int16).view(-1).split(PIECE) for t in (a, b))
    return all(map(torch.equal, *pieces))


@functools.cache
def _library(device: int) -> Library:
    return Library(load(), capability(device))


def capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def gpu(device: int) -> str:
    return torch.cuda.get_device_name(device)


def unnamed_problem(device: int) -> str | None:
    """Why configurations that cuBLASLt does not return are not tried on this GPU, or None."""
    try:
        return configurations.problem(load(), capability(device))
    except Refused as no:
        return str(no)


def readings(ways: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Median microseconds of each on the GPU, measured in turns. Nothing synchronises in between,
    so that the GPU is as hot as in a model."""
    ways[0]()  # while it runs, the host queues the rest
    taken = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in ways * rounds]
    for way, (begin, end) in zip(ways * rounds, taken, strict=True):
        begin.record()
        way()
        end.record()
    taken[-1][1].synchronize()
    us = [begin.elapsed_time(end) * 1e3 for begin, end in taken]
    return [statistics.median(us[i :: len(ways)]) for i in range(len(ways))]
