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
  // pair c of row j lies at c ^ j / 2: neighbours along a row and down a column are in other banks
  __shared__ Pair tile[$tile][$tile / 2];
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
  if (((i64)from / sizeof(T) | across | near) % 2 == 0) {
    Pair read[$tile / 8];
#pragma unroll
    for (unsigned k = 0; k < $tile / 8; k++)
      if (const unsigned j = warp + 8 * k; j < far && 2 * lane < near)
        read[k] = *(const Pair*)(from + j * across + 2 * lane);
#pragma unroll
    for (unsigned k = 0; k < $tile / 8; k++)
      if (const unsigned j = warp + 8 * k; j < far) tile[j][lane ^ j / 2] = read[k];
  } else {
    for (unsigned j = warp; j < far; j += 8)
      for (unsigned i = lane; i < near; i += 32) {
        Pair& pair = tile[j][i / 2 ^ j / 2];
        (i % 2 ? pair.b : pair.a) = from[j * across + i];
      }
  }
  __syncthreads();
  const bool even = ((i64)to / sizeof(T) | down | far) % 2 == 0;
  to += 2 * warp * down + 2 * lane;
  if (2 * lane >= far) return;
#pragma unroll
  for (unsigned k = 0; k < $tile / 16; k++, to += 16 * down) {
    const unsigned c = warp + 8 * k;
    const Pair one = tile[2 * lane][c ^ lane], two = tile[2 * lane + 1][c ^ lane];
    if (even) {
      if (2 * c < near) *(Pair*)to = Pair{one.a, two.a};
      if (2 * c + 1 < near) *(Pair*)(to + down) = Pair{one.b, two.b};
    } else {
      const bool both = 2 * lane + 1 < far;
      if (2 * c < near) to[0] = one.a;
      if (2 * c < near && both) to[1] = two.a;
      if (2 * c + 1 < near) to[down] = one.b;
      if (2 * c + 1 < near && both) to[down + 1] = two.b;
    }
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
    if not near or not far or near == far:
        return None
    if not set(source) == set(extents) == set(target):  # some element is read or written repeatedly
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
