"""CUDA C++ that moves a tensor into another layout, tile by tile.

Reading follows the layout of the source and writing that of the target; a tile in shared memory is
between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from string import Template

from ..backends import Unsupported
from .cuda_kernel import ENTRY, Kernel, Tensor
from .expression import Load
from .index import position
from .program import Program

# elements of a tile each way: 128 bytes of half precision, one warp's access in pairs
TILE = 64
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
CODE = Template("""\
using i64 = long long;
using T = $word;
struct alignas(2 * sizeof(T)) Pair { T a, b; };
struct Args {
  void* at[2]; i64 strides[2][$rank]; unsigned extents[$rank]; unsigned count; unsigned extra[2];
};
extern "C" __global__ void __launch_bounds__(256) $entry(const __grid_constant__ Args a) {
  __shared__ T tile[$tile][$tile + 2];
  unsigned number = blockIdx.x;
  const unsigned d$last = number % a.extents[$last]; number /= a.extents[$last];
  const unsigned d$before = number % a.extents[$before]; number /= a.extents[$before];
$digits
  const T* from = (const T*)a.at[0]$from;
  T* to = (T*)a.at[1]$to;
  const i64 across = a.strides[0][$last] / $tile, down = a.strides[1][$before] / $tile;
  const unsigned near = min($tile, a.extra[0] - d$before * $tile);
  const unsigned far = min($tile, a.extra[1] - d$last * $tile);
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool even_in = ((i64)from / sizeof(T) | across | near) % 2 == 0;
  for (unsigned j = warp; j < far; j += 8) {
    if (even_in) {
      if (2 * lane < near) {
        const Pair p = *(const Pair*)(from + j * across + 2 * lane);
        tile[j][2 * lane] = p.a; tile[j][2 * lane + 1] = p.b;
      }
    } else for (unsigned i = lane; i < near; i += 32) tile[j][i] = from[j * across + i];
  }
  __syncthreads();
  const bool even_out = ((i64)to / sizeof(T) | down | far) % 2 == 0;
  for (unsigned i = warp; i < near; i += 8) {
    if (even_out) {
      if (2 * lane < far)
        *(Pair*)(to + i * down + 2 * lane) = Pair{tile[2 * lane][i], tile[2 * lane + 1][i]};
    } else for (unsigned j = lane; j < far; j += 32) to[i * down + j] = tile[j][i];
  }
}
""")


def kernel(program: Program, tensors: Mapping[str, Tensor]) -> Kernel | None:
    """The kernel of a copy whose source and target have different dimensions next to each other;
    None for any other program."""
    (store, *others) = program.stores
    load = store.value
    if others or not isinstance(load, Load) or load.dtype != store.dtype:
        return None
    extents = dict(program.extents)
    read = position(load.index, tensors[load.source].strides)
    written = position(store.index, tensors[store.target].strides)
    source, target = dict(read.terms), dict(written.terms)
    near = [n for n in extents if source.get(n) == 1]
    far = [n for n in extents if target.get(n) == 1]
    if not near or not far or near == far or set(source) != set(extents) != set(target):
        return None
    i, j = near[0], far[0]
    batch = [n for n in extents if n not in (i, j)]
    size = store.dtype.itemsize
    if size not in WORDS:
        raise Unsupported(f"copies of {store.dtype}")
    rank, before, last = len(batch) + 2, len(batch), len(batch) + 1
    digits = [
        f"  const unsigned d{k} = number % a.extents[{k}]; number /= a.extents[{k}];"
        for k in reversed(range(len(batch)))
    ]
    moved = ["".join(f" + d{k} * a.strides[{p}][{k}]" for k in range(rank)) for p in (0, 1)]
    code = CODE.substitute(
        **{"word": WORDS[size], "rank": rank, "entry": ENTRY, "tile": TILE, "last": last},
        **{"before": before, "digits": "\n".join(digits), "from": moved[0], "to": moved[1]},
    )
    steps = [[*(s[n] for n in batch), s[i] * TILE, s[j] * TILE] for s in (source, target)]
    tiles = [*(extents[n] for n in batch), -(-extents[i] // TILE), -(-extents[j] // TILE)]
    return Kernel(
        code,
        block=256,
        row_threads=256,
        pointers=[(load.source, read.constant), (store.target, written.constant)],
        extents=tiles,
        numbers=[*steps[0], *steps[1], *tiles, prod(tiles), extents[i], extents[j]],
        layout=f"{2 * rank}q{rank + 3}I",
        alignment=1,
    )
