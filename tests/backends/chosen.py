"""Fewer kernels to compile than there are: those most like the ones left out, or larger.

Of Triton kernels for sm_90, none that is left out used more registers than the one that stands for
it. Of CUDA kernels some do: up to 80, of the 128 that the largest block may have.
KERNELWRIGHT_EVERYTHING=1 compiles all of those.
"""

import re
from collections.abc import Hashable, Iterable
from math import prod

from planned import Kernel


def every_argument(found: Iterable[Kernel], first: Iterable[Kernel]) -> list[Kernel]:
    """`first`, and as many CUDA kernels of the others as it takes for every template argument to be
    compiled, such as dtype, vector, order of summation and rounding."""
    chosen = {k.launch.code: k for k in first}
    rest = {k.launch.code: (k, _facts(k)) for k in found}
    missing = set().union(*(facts for _, facts in rest.values()))
    for k in chosen.values():
        missing -= _facts(k)
    while missing:
        kernel, facts = max(rest.values(), key=lambda each: len(each[1] & missing))
        chosen[kernel.launch.code] = kernel
        missing -= facts
    return list(chosen.values())


def _facts(k: Kernel) -> set[tuple[Hashable, ...]]:
    name, *values = re.split(r"[<>, ]+", k.launch.template)
    arguments = [(name, "op", k.call.op), *((name, i, v) for i, v in enumerate(values))]
    if spread := re.search(r"Spread<(\d+), (\d+), (\d+)>", k.launch.template):
        width, vector, threads = map(int, spread.groups())
        arguments.append((name, "elements of a thread", -(-width // threads)))
        arguments.append((name, "remainder", width % (vector * threads) != 0))
    return set(arguments)


def largest_for_a_thread(found: Iterable[Kernel]) -> list[Kernel]:
    """Of Triton kernels that differ in widths, strides and threads only, the one whose threads have
    the most elements, and so the most registers."""
    largest: dict[Hashable, Kernel] = {}
    for k in found:
        kind = _kind(k)
        if kind not in largest or _elements_of_a_thread(k) > _elements_of_a_thread(largest[kind]):
            largest[kind] = k
    return list(largest.values())


def _kind(k: Kernel) -> Hashable:
    dtypes = tuple(getattr(k.call.get(n), "dtype", None) for n in k.launch.pointers)
    return choices(k), k.launch.alignment, dtypes


def choices(k: Kernel) -> Hashable:
    """What a Triton kernel computes, whatever its widths and dtypes are."""
    chosen = {n: v for n, v in k.launch.constants.items() if isinstance(v, bool | str)}
    return k.launch.kernel.__name__, repr(sorted(chosen.items()))


def _elements_of_a_thread(k: Kernel) -> float:
    block = {n: k.launch.constants.get(n, 0) for n in ("HEAD", "TAIL", "BLOCK", "U")}
    sides = [k.launch.constants.get(n, 1) for n in ("ROWS", "BQ", "CHANNELS", "POSITIONS")]
    return prod(sides) * max(sum(block.values()), 1) / k.launch.num_warps
