"""Rotation tables: the shapes that models pass, and the tables of rope_1d and rope_3d."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...backends.torch_internals import dispatch_modes, in_functorch
from .. import library

_SCHEMA = (
    "(SymInt num_frames, SymInt height, SymInt width, int dim_t, int dim_h, int dim_w, "
    "float theta_t, float theta_h, float theta_w, Device device) -> (Tensor, Tensor)"
)


def over_rows(table: Tensor, x: Tensor) -> Tensor:
    """A table [S, P], [B, S, P] or one that broadcasts already, with the dimensions of x.

    x is [B, S, heads, D] or [B, S, C]; a table with as many dimensions as x is taken as it is, so
    [B, 1, S, D] serves x [B, heads, S, D].
    """
    if table.ndim == 4 and x.ndim == 3:
        return table.squeeze(2)
    if x.ndim == 4 and table.ndim in (2, 3):
        table = table.unsqueeze(-2)
    return table


def split(dim: int) -> tuple[int, int, int]:
    """Even-sized shares of a head for time, height and width: 64 -> 24, 20, 20.

    Height and width get a third each, rounded down to an even number; time gets the rest.
    """
    third = dim // 3 // 2 * 2
    return dim - 2 * third, third, third


def grid_tables(
    grid: tuple[int, int, int],
    dims: tuple[int, int, int],
    thetas: tuple[float, float, float],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """cos and sin [T*H*W, D/2] in float32 for tokens on a grid of T frames of H x W.

    Axis n rotates dims[n] / 2 pairs by position * theta_n ** (-2j / dims[n]).
    """
    if torch.compiler.is_compiling():
        return _node(*grid, *dims, *thetas, device)
    if dispatch_modes() or in_functorch():
        # tensors of a mode or of a transform end with it: do not cache such tables
        return _make(grid, dims, thetas, device)
    return _kept(grid, dims, thetas, device)


@functools.lru_cache(maxsize=32)
def _kept(
    grid: tuple[int, int, int],
    dims: tuple[int, int, int],
    thetas: tuple[float, float, float],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "rope: the tables for this grid are not made yet, and making them would put them into "
            "the CUDA graph being captured; call the op once with these shapes before capturing"
        )
    with torch.inference_mode(False):
        return _make(grid, dims, thetas, device)


def _make(
    grid: tuple[int, int, int],
    dims: tuple[int, int, int],
    thetas: tuple[float, float, float],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """In float64, so that the angle of a far token is right to the last bit of float32."""
    columns = []
    for axis, (dim, theta) in enumerate(zip(dims, thetas, strict=True)):
        shape = [1, 1, 1, dim // 2]
        shape[axis] = grid[axis]
        position = torch.arange(grid[axis], dtype=torch.float64, device=device)
        power = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / max(dim, 1)
        angle = torch.outer(position, theta**-power)
        columns.append(angle.view(shape).expand(*grid, dim // 2))
    angles = torch.cat(columns, dim=-1).flatten(0, 2)
    return angles.cos().float(), angles.sin().float()


def _op(*values: Any) -> tuple[Tensor, Tensor]:
    t, h, w, dt, dh, dw, tt, th, tw, device = values
    cos, sin = _kept((t, h, w), (dt, dh, dw), (tt, th, tw), device)
    return cos.clone(), sin.clone()


def _fake(*values: Any) -> tuple[Tensor, Tensor]:
    t, h, w, dt, dh, dw, *_, device = values
    shape = (t * h * w, (dt + dh + dw) // 2)
    table = torch.empty(shape, dtype=torch.float32, device=device)
    return table, torch.empty_like(table)


_node = library.define("rope_tables", _SCHEMA, _op, _fake)
