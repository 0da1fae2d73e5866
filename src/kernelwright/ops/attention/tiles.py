"""Tile sizes of the Triton kernels for each GPU, and how many programs share the work."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Tile:
    """Query rows and keys per step, warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# Chosen from compiled code (triton 3.9): the largest tiles of FlexAttention's defaults for H100 and
# A100 that ptxas fits without spilling, not yet from timings. Keyed by the padded head_dim.
HOPPER = {64: Tile(128, 128, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 32, 8, 2)}
# two stages at 128: three take 98 KB, and sm_86, sm_89 and sm_120 have 99 KB of shared memory
AMPERE = {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)}
# a mask with a row for each query needs an address per element if its rows are not aligned, so
# smaller tiles (128 x 64 at head_dim 128 spills 590 bytes on sm_90, 64 x 32 none)
ROW_MASK = {64: Tile(128, 64, 8, 2), 128: Tile(64, 32, 8, 2), 256: Tile(64, 32, 8, 2)}
# no tensor cores (float32 in full precision; Triton has no mma for sm_75): each thread holds whole
# rows of the product, 64 x 32 over 8 warps takes 208 to 254 registers
SCALAR = {64: Tile(64, 32, 8, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)}


@dataclass(frozen=True)
class Walk:
    """How programs loop over the query rows of a head whose keys they hold: rows per step, warps,
    stages of the pipeline that loads them, and programs per multiprocessor."""

    rows: int
    warps: int
    stages: int
    resident: int


# For 128 keys of head_dim 64 with a mask (triton 3.6, sm_90) three stages take 139 registers and
# 64 KB: three programs fit a multiprocessor, and the next block is in flight during a block. Tried
# on H200 at 2x32x2688 queries, us: 20.5; two programs 22.2, six 23.3, nine 24.5; two stages, four
# programs 23.7; four stages 20.4; 128 rows over 8 warps, one program 26.1.
FEW_KEYS_WALK = Walk(64, 4, 3, 3)
# 256 keys, or 128 of head_dim 128, take all 255 registers, and the former spill
FEW_KEYS, FEW_KEYS_HEAD_DIM = 128, 64


def few_keys(
    capability: tuple[int, int],
    dtype: torch.dtype,
    queries: int,
    keys: int,
    head_dim: int,
    causal: bool,
    row_mask: bool,
) -> bool:
    """Whether one program can hold the keys, the values and the mask of a head: on Hopper, whose
    tensor cores read them from shared memory."""
    return (
        capability[0] == 9
        and dtype in (torch.float16, torch.bfloat16)
        and queries > 16
        and keys <= FEW_KEYS
        and head_dim <= FEW_KEYS_HEAD_DIM
        and not (causal or row_mask)
    )


def programs_a_head(blocks: int, heads: int, slots: int) -> int:
    """Programs among which a head's blocks of rows are divided, for the fewest steps in total when
    `slots` programs run at once. Starting a program takes as long as a step."""

    def steps(programs: int) -> int:
        waves = -(-heads * programs // slots)
        return waves * (1 + -(-blocks // programs))

    most = min(blocks, 1 + 4 * slots // heads)
    return min(range(1, most + 1), key=steps)


def tile_for(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, queries: int, row_mask: bool
) -> Tile:
    """The tile for a head_dim; short queries take fewer rows."""
    if dtype == torch.float32 or capability < (8, 0):
        table = SCALAR
    elif row_mask:
        table = ROW_MASK
    else:
        table = HOPPER if capability[0] in (9, 10) else AMPERE
    tile = table[max(64, padded(head_dim))]
    if padded(head_dim) != head_dim and table is not HOPPER:
        # masking the columns takes registers too: 72 at 128 x 64 spills on sm_80, 128 does not
        tile = replace(tile, keys=max(16, tile.keys // 2))
    if queries <= 16:
        return replace(tile, rows=16, warps=4)
    return replace(tile, rows=64) if queries <= 64 < tile.rows else tile


def padded(width: int) -> int:
    """The power of two a head_dim is padded to; tensor cores need 16 at least."""
    return max(16, 1 << (width - 1).bit_length())
