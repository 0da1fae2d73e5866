"""How the Triton kernel is launched: tile sizes a GPU, and a call in the kernel's own words."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...backends import Unsupported

if TYPE_CHECKING:
    from ...backends.triton import TritonLaunch
    from ..plan import Call

MAX_HEAD_DIM = 256
MAX_PROGRAMS = 2**31 - 1


@dataclass(frozen=True)
class Tile:
    """Query rows and keys a step, and how the work is spread."""

    rows: int
    keys: int
    warps: int
    stages: int


# Chosen from compiled code (triton 3.9): the largest tiles of FlexAttention's defaults for H100 and
# A100 that ptxas fits without spilling, not yet from timings. Keyed by the padded head_dim.
HOPPER = {64: Tile(128, 128, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 32, 8, 2)}
# two stages at 128: three take 98 KB, and sm_86, sm_89 and sm_120 have 99 KB of shared memory
AMPERE = {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)}
# a mask with its own row a query: an address an element when its rows are not aligned, so
# smaller tiles (128 x 64 at head_dim 128 spills 590 bytes on sm_90, 64 x 32 none)
ROW_MASK = {64: Tile(128, 64, 8, 2), 128: Tile(64, 32, 8, 2), 256: Tile(64, 32, 8, 2)}
# no tensor cores (float32 in full precision; Triton has no mma for sm_75): each thread holds whole
# rows of the product, 64 x 32 over 8 warps takes 208 to 254 registers
SCALAR = {64: Tile(64, 32, 8, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)}


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


def mask_strides(mask: Tensor | None) -> tuple[int, int, int, int]:
    """Strides of a mask broadcast to [B, H, Sq, Sk]: 0 along every dimension it does not have."""
    if mask is None:
        return 0, 0, 0, 0
    own = [0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True)]
    b, h, q, k = (0,) * (4 - mask.ndim) + tuple(own)
    return b, h, q, k


def common_unit(strides: tuple[int, ...], most: int) -> int:
    """The largest power of two, up to `most`, that divides every stride."""
    return math.gcd(most, *strides)


def plan(call: Call) -> TritonLaunch:
    from ...backends.triton import TritonLaunch, interpreting
    from .triton import attention_kernel

    query, key, value, mask, out = (call[n] for n in ("query", "key", "value", "mask", "out"))
    batch, heads, queries, head_dim = query.shape
    groups, keys, value_dim = key.shape[1], key.shape[2], value.shape[-1]
    wider = max(head_dim, value_dim)
    if wider > MAX_HEAD_DIM:
        raise Unsupported(f"head_dim {wider}; the kernel holds up to {MAX_HEAD_DIM}")
    scale = head_dim**-0.5 if call["scale"] is None else call["scale"]
    kind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "float"
    *mask_rows, mask_column = mask_strides(mask)
    tensors = (query, key, value, out)
    strides = tuple(s for t in tensors for s in _row_strides(t))
    unit, mask_unit = common_unit(strides, 8), common_unit(tuple(mask_rows), 16)
    block_d, block_e = padded(head_dim), padded(value_dim)
    tile = tile_for(call.target.capability, query.dtype, wider, queries, mask_rows[2] != 0)
    programs = -(-queries // tile.rows) * batch * heads
    if programs > MAX_PROGRAMS:
        raise Unsupported(f"{programs} blocks of queries; a launch holds up to {MAX_PROGRAMS}")
    units = [s // unit for s in strides]
    return TritonLaunch(
        kernel=attention_kernel,
        grid=(programs,),
        pointers=("query", "key", "value", "mask", "out"),
        scalars=(
            float(scale) if kind == "float" else float(scale) * math.log2(math.e),
            queries,
            keys,
            heads,
            heads // groups,
            *units[:9],
            *(s // mask_unit for s in mask_rows),
            *units[9:],
        ),
        constants={
            "D": head_dim,
            "E": value_dim,
            "BQ": tile.rows,
            "BK": tile.keys,
            "BD": block_d,
            "BE": block_e,
            "UNIT": unit,
            "MASK": kind,
            "MASK_UNIT": mask_unit,
            "MASK_ROWS": mask_rows[2] != 0,
            "MASK_COLUMNS": mask_column != 0,
            "CAUSAL": bool(call["causal"]),
            "POSITIVE": scale > 0,
            "WIDEN": interpreting() and query.dtype == torch.bfloat16,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        alignment=call.alignment,
    )


def _row_strides(t: Tensor) -> tuple[int, ...]:
    """Strides of batch, head and row; those of single entries are never taken."""
    return tuple(0 if n == 1 else s for n, s in zip(t.shape[:3], t.stride()[:3], strict=True))
