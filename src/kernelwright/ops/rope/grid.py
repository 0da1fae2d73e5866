"""Rotary embedding by position: of tokens on a line, or on a video grid of frames."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import checks
from ..composite import Composite
from ..selection import BACKENDS
from . import cases
from .apply import APPLY_ROPE_QK, LAYOUTS
from .tables import grid_tables, split


def rope_1d(
    query: Tensor,
    key: Tensor,
    theta_base: float = 1e4,
    *,
    layout: str = "interleaved",
    inplace: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate pair j of token s by s * theta_base^(-2j / D).  Returns new (query, key).

    Args:
        query, key: [B, S, heads, D].
        layout, inplace: as in `apply_rope`.

    >>> q, k = rope_1d(torch.ones(1, 2, 1, 2), torch.ones(1, 2, 1, 2))
    >>> q[0, 0, 0]
    tensor([1., 1.])
    """
    _check_heads("rope_1d", query, key, layout, inplace, backend)
    _check_numbers("rope_1d", {}, {"theta_base": theta_base})
    return _on_grid(
        "rope_1d",
        query,
        key,
        (query.shape[1], 1, 1),
        (query.shape[3], 0, 0),
        (theta_base,) * 3,
        layout,
        inplace,
        backend,
    )


def rope_3d(
    query: Tensor,
    key: Tensor,
    num_frames: int,
    height: int,
    width: int,
    theta_base: float = 1e4,
    *,
    layout: str = "interleaved",
    inplace: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate by the position of a token in time, height and width.  Returns new (query, key).

    D is split evenly over the axes: height and width get D/3 rounded down to an even number, time
    the rest (64 -> 24, 20, 20); the shares lie in the order time, height, width.

    Args:
        query, key: [B, num_frames * height * width, heads, D].

    >>> x = torch.ones(1, 8, 1, 6)
    >>> q, k = rope_3d(x, x, num_frames=2, height=2, width=2)
    """
    _check_heads("rope_3d", query, key, layout, inplace, backend)
    counts = {"num_frames": num_frames, "height": height, "width": width}
    _check_numbers("rope_3d", counts, {"theta_base": theta_base})
    return _on_grid(
        "rope_3d",
        query,
        key,
        (num_frames, height, width),
        split(query.shape[3]),
        (theta_base,) * 3,
        layout,
        inplace,
        backend,
    )


def rope_3d_extended(
    query: Tensor,
    key: Tensor,
    num_frames: int,
    height: int,
    width: int,
    rope_dim_t: int,
    rope_dim_h: int,
    rope_dim_w: int,
    theta_base_t: float = 1e4,
    theta_base_h: float = 1e4,
    theta_base_w: float = 1e4,
    *,
    layout: str = "interleaved",
    inplace: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`rope_3d` with a share of D and a base of its own for each axis.  Returns new (query, key).

    Args:
        query, key: [B, num_frames * height * width, heads, D].
        rope_dim_t, rope_dim_h, rope_dim_w: even, with the sum D.

    >>> x = torch.ones(1, 8, 1, 8)
    >>> q, k = rope_3d_extended(x, x, 2, 2, 2, 4, 2, 2)
    """
    op = "rope_3d_extended"
    _check_heads(op, query, key, layout, inplace, backend)
    shares = {"rope_dim_t": rope_dim_t, "rope_dim_h": rope_dim_h, "rope_dim_w": rope_dim_w}
    _check_numbers(
        op,
        {"num_frames": num_frames, "height": height, "width": width, **shares},
        {"theta_base_t": theta_base_t, "theta_base_h": theta_base_h, "theta_base_w": theta_base_w},
    )
    for name, dim in shares.items():
        if dim % 2:
            raise ValueError(f"{op}: {name} is {checks.shown(dim)}, expected an even number")
    dims = (rope_dim_t, rope_dim_h, rope_dim_w)
    if sum(dims) != query.shape[3]:
        raise ValueError(
            f"{op}: rope_dim_t + rope_dim_h + rope_dim_w is {checks.shown(sum(dims))}, "
            f"query has head dimension {query.shape[3]}"
        )
    return _on_grid(
        op,
        query,
        key,
        (num_frames, height, width),
        dims,
        (theta_base_t, theta_base_h, theta_base_w),
        layout,
        inplace,
        backend,
    )


def _check_heads(
    op: str, query: Tensor, key: Tensor, layout: str, inplace: bool, backend: str | None
) -> None:
    checks.how(op, None, (), backend, BACKENDS)
    checks.choice(op, "inplace", inplace, (True, False))
    both = {"query": query, "key": key}
    for name, t in both.items():
        checks.tensor(op, name, t)
        if t.ndim != 4:
            raise ValueError(f"{op}: {name} has shape {list(t.shape)}, expected [B, S, heads, D]")
    checks.common(op, both)
    checks.one_dtype(op, both)
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"{op}: key has head dimension {key.shape[3]}, query has {query.shape[3]}")
    if query.shape[3] % 2:
        raise ValueError(f"{op}: query has head dimension {query.shape[3]}, expected an even one")
    checks.choice(op, "layout", layout, LAYOUTS)


def _check_numbers(op: str, counts: dict[str, Any], thetas: dict[str, Any]) -> None:
    for name, n in counts.items():
        checks.kinds(op, [(name, "int")], [n])
        if n < 0:
            came = checks.shown(n)
            raise ValueError(f"{op}: {name} is {came}, expected a whole number, zero or above")
    for name, theta in thetas.items():
        checks.finite(op, name, theta)
        if theta <= 0:
            raise ValueError(f"{op}: {name} is {theta!r}, expected a finite number above zero")


def _on_grid(
    op: str,
    query: Tensor,
    key: Tensor,
    grid: tuple[int, int, int],
    dims: tuple[int, int, int],
    thetas: tuple[float, float, float],
    layout: str,
    inplace: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    tokens = grid[0] * grid[1] * grid[2]
    for name, t in (("query", query), ("key", key)):
        if t.shape[1] != tokens:
            raise ValueError(
                f"{op}: {name} has {t.shape[1]} tokens, "
                f"num_frames * height * width is {checks.shown(tokens)}"
            )
    cos, sin = grid_tables(grid, dims, thetas, query.device)
    return APPLY_ROPE_QK.run(query, key, cos, sin, layout, inplace=inplace, backend=backend)


def _grid(function: Any, formula: str, grid_cases: Any) -> Composite:
    return Composite(
        name=function.__name__,
        formula=formula,
        function=function,
        reference=lambda **a: function(**a, backend="torch"),
        cases=grid_cases,
        backends=("torch", "triton", "cuda"),
        chooser=APPLY_ROPE_QK.choose_for,
    )


_grid(rope_1d, "rotate pair j of token s by s · theta^(-2j/D)", cases.ROPE_1D)
_grid(rope_3d, "rotate by position in time, height and width", cases.ROPE_3D)
_grid(rope_3d_extended, "rope_3d with a share and a base for each axis", cases.ROPE_3D_EXTENDED)
