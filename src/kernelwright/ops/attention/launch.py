"""Plans the launches of the Triton attention kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backends import Unsupported
from . import tiles

if TYPE_CHECKING:
    from ...backends.triton import TritonLaunch
    from ..plan import Call

MAX_HEAD_DIM = 256
MAX_PROGRAMS, MAX_DEPTH = 2**31 - 1, 2**16 - 1


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
    query, key, value, mask, out = (call[n] for n in ("query", "key", "value", "mask", "out"))
    queries, wider = query.shape[2], max(query.shape[3], value.shape[3])
    if wider > MAX_HEAD_DIM:
        raise Unsupported(f"head_dim {wider}; the kernel holds up to {MAX_HEAD_DIM}")
    capability, dtype, causal = call.target.capability, query.dtype, bool(call["causal"])
    row_mask = mask_strides(mask)[2] != 0
    walk = tiles.FEW_KEYS_WALK
    # the kernel for few keys has 32-bit offsets inside a block, and batches along grid dimension z
    rows = max(walk.rows, tiles.FEW_KEYS)
    near = rows * max(t.stride(2) for t in (query, key, value, out)) < 2**31
    if (
        near
        and query.shape[0] <= MAX_DEPTH
        and tiles.few_keys(capability, dtype, queries, key.shape[2], wider, causal, row_mask)
    ):
        return _plan_few_keys(call, walk)
    return _plan_blocks(call, tiles.tile_for(capability, dtype, wider, queries, row_mask))


def _plan_blocks(call: Call, tile: tiles.Tile) -> TritonLaunch:
    """One program per block of query rows; it loops over the keys."""
    from .triton import attention_kernel

    batch, heads, queries, _ = call["query"].shape
    programs = -(-queries // tile.rows) * batch * heads
    scale, constants = _scale(call), _constants(call)
    return _launch(
        call,
        kernel=attention_kernel,
        grid=(programs,),
        # the kernel reads a float mask in natural units
        scale=scale if constants["MASK"] == "float" else scale * math.log2(math.e),
        constants=constants
        | {
            "BQ": tile.rows,
            "BK": tile.keys,
            "MASK_ROWS": mask_strides(call["mask"])[2] != 0,
            "CAUSAL": bool(call["causal"]),
            "POSITIVE": scale > 0,
        },
        warps=tile.warps,
        stages=tile.stages,
    )


def _plan_few_keys(call: Call, walk: tiles.Walk) -> TritonLaunch:
    """A few programs per head; each holds all its keys and loops over query rows."""
    from .few_keys import attention_few_keys_kernel

    batch, heads, queries, _ = call["query"].shape
    keys, scale, constants = call["key"].shape[2], _scale(call), _constants(call)
    slots = walk.resident * call.target.multiprocessors
    blocks, block_k = -(-queries // walk.rows), tiles.padded(keys)
    return _launch(
        call,
        kernel=attention_few_keys_kernel,
        grid=(heads, tiles.programs_a_head(blocks, batch * heads, slots), batch),
        scale=scale * math.log2(math.e),
        constants=constants
        | {
            "BQ": walk.rows,
            "BK": block_k,
            "BIAS": constants["MASK"] != "none" or keys != block_k or scale <= 0,
            "GROUPED": heads != call["key"].shape[1],
            "STAGES": walk.stages,
        },
        warps=walk.warps,
        stages=walk.stages,
    )


def _scale(call: Call) -> float:
    return float(call["query"].shape[3] ** -0.5 if call["scale"] is None else call["scale"])


def _constants(call: Call) -> dict[str, Any]:
    """The compile-time constants of both kernels."""
    from ...backends.triton import interpreting

    query, mask = call["query"], call["mask"]
    head_dim, value_dim = query.shape[3], call["value"].shape[3]
    *mask_rows, mask_column = mask_strides(mask)
    return {
        "D": head_dim,
        "E": value_dim,
        "BD": tiles.padded(head_dim),
        "BE": tiles.padded(value_dim),
        "UNIT": common_unit(_strides(call), 8),
        "MASK": "none" if mask is None else "bool" if mask.dtype == torch.bool else "float",
        "MASK_UNIT": common_unit(tuple(mask_rows), 16),
        "MASK_COLUMNS": mask_column != 0,
        "WIDEN": interpreting() and query.dtype == torch.bfloat16,
    }


def _launch(
    call: Call,
    kernel: Any,
    grid: tuple[int, ...],
    scale: float,
    constants: dict[str, Any],
    warps: int,
    stages: int,
) -> TritonLaunch:
    from ...backends.triton import TritonLaunch

    if grid[0] > MAX_PROGRAMS:
        raise Unsupported(f"{grid[0]} blocks of queries; a launch holds up to {MAX_PROGRAMS}")
    heads, groups = call["query"].shape[1], call["key"].shape[1]
    units = [s // constants["UNIT"] for s in _strides(call)]
    return TritonLaunch(
        kernel=kernel,
        grid=grid,
        pointers=("query", "key", "value", "mask", "out"),
        scalars=(
            scale,
            call["query"].shape[2],
            call["key"].shape[2],
            heads,
            heads // groups,
            *units[:9],
            *(s // constants["MASK_UNIT"] for s in mask_strides(call["mask"])[:3]),
            *units[9:],
        ),
        # in the order of the kernel's arguments: a launch passes them by position
        constants={n: constants[n] for n in kernel.arg_names if n in constants},
        num_warps=warps,
        num_stages=stages,
        alignment=call.alignment,
    )


def _strides(call: Call) -> tuple[int, ...]:
    """Row strides of query, key, value and output, three each."""
    return tuple(s for n in ("query", "key", "value", "out") for s in _row_strides(call[n]))


def _row_strides(t: Tensor) -> tuple[int, ...]:
    """Strides of batch, head and row; 0 for a dimension of size 1."""
    return tuple(0 if n == 1 else s for n, s in zip(t.shape[:3], t.stride()[:3], strict=True))
