"""Rotary position embedding: by given tables, and on a line or a video grid."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..op import Composite, Op
from . import cases, reference
from .kernel import RopeKernel
from .tables import grid_tables, over_rows, split

__all__ = ["apply_rope", "apply_rope_qk", "rope_1d", "rope_3d", "rope_3d_extended"]
LAYOUTS = ("interleaved", "half")


def apply_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: str = "interleaved",
    *,
    inplace: bool = False,
    exact: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = (a cos - b sin, b cos + a sin) for the pairs (a, b) of each row.

    Args:
        x: [B, S, heads, D], [B, S, D], or any shape the tables broadcast to.
        cos, sin: [S, D], [B, S, D], or with as many dimensions as x; D/2 columns serve as well.
        layout: "interleaved" pairs neighbours (LTX, FLUX, Wan), "half" pairs elements D/2 apart
            (Llama).
        inplace: overwrite x.
        exact: "diffusers" (float32 steps: LTX, FLUX), "transformers" (steps in the dtype of x and
            tables: Llama) or "wan".

    >>> apply_rope(torch.ones(1, 1, 2), torch.zeros(1, 1), torch.ones(1, 1))
    tensor([[[-1.,  1.]]])
    """
    return APPLY_ROPE(x, cos, sin, layout, inplace=inplace, exact=exact, backend=backend)


def apply_rope_qk(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: str = "interleaved",
    *,
    inplace: bool = False,
    exact: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """q, k = apply_rope(query), apply_rope(key), in one launch.

    Args:
        query, key: as x in `apply_rope`; they may have different numbers of heads.
        cos, sin, layout, inplace, exact: as in `apply_rope`.

    >>> x = torch.ones(1, 1, 2)
    >>> q, k = apply_rope_qk(x, x, torch.zeros(1, 1), torch.ones(1, 1))
    """
    return APPLY_ROPE_QK(
        query, key, cos, sin, layout, inplace=inplace, exact=exact, backend=backend
    )


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
    _check_heads("rope_1d", query, key, layout)
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
    _check_heads("rope_3d", query, key, layout)
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
    _check_heads(op, query, key, layout)
    shares = {"rope_dim_t": rope_dim_t, "rope_dim_h": rope_dim_h, "rope_dim_w": rope_dim_w}
    _check_numbers(
        op,
        {"num_frames": num_frames, "height": height, "width": width, **shares},
        {"theta_base_t": theta_base_t, "theta_base_h": theta_base_h, "theta_base_w": theta_base_w},
    )
    for name, dim in shares.items():
        if dim % 2:
            raise ValueError(f"{op}: {name} is {dim!r}, expected an even number")
    dims = (rope_dim_t, rope_dim_h, rope_dim_w)
    if sum(dims) != query.shape[3]:
        raise ValueError(
            f"{op}: rope_dim_t + rope_dim_h + rope_dim_w is {sum(dims)}, "
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


def _check_heads(op: str, query: Tensor, key: Tensor, layout: str) -> None:
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
        if not isinstance(n, int | torch.SymInt) or n < 0:
            raise ValueError(f"{op}: {name} is {n!r}, expected a whole number, zero or above")
    for name, theta in thetas.items():
        if not isinstance(theta, int | float) or not 0 < theta < math.inf:
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
                f"{op}: {name} has {t.shape[1]} tokens, num_frames * height * width is {tokens}"
            )
    cos, sin = grid_tables(grid, dims, thetas, query.device)
    return APPLY_ROPE_QK(query, key, cos, sin, layout, inplace=inplace, backend=backend)


def check_tables(
    op: str, name: str, x: Tensor, cos: Tensor, sin: Tensor, layout: str, width: int
) -> None:
    """Tables that fit rows of `width`: D or D/2 columns, spreading over the leading dims of x."""
    checks.choice(op, "layout", layout, LAYOUTS)
    if width % 2:
        raise ValueError(f"{op}: {name} has width {width}, expected an even one")
    checks.tensor(op, "cos", cos, min_dims=2)
    checks.like(op, "sin", sin, cos, "cos")
    if cos.shape[-1] not in (width, width // 2):
        raise ValueError(
            f"{op}: cos has {cos.shape[-1]} columns, {name} has width {width}; "
            f"expected {width} or {width // 2}"
        )
    table = over_rows(cos, x)
    lead = x.shape[:-1]
    if table.ndim > x.ndim or any(
        n not in (1, m) for n, m in zip(reversed(table.shape[:-1]), reversed(lead), strict=False)
    ):
        raise ValueError(
            f"{op}: cos has shape {list(cos.shape)}, "
            f"which does not spread over {name} {list(x.shape)}"
        )


def _check(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> None:
    checks.tensor("apply_rope", "x", x, min_dims=2)
    check_tables("apply_rope", "x", x, cos, sin, layout, x.shape[-1])


def _check_qk(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str) -> None:
    op = "apply_rope_qk"
    for name, t in (("query", query), ("key", key)):
        checks.tensor(op, name, t, min_dims=2)
        check_tables(op, name, t, cos, sin, layout, t.shape[-1])
    if key.dtype != query.dtype:
        raise TypeError(f"{op}: key is {key.dtype}, query is {query.dtype}")


APPLY_ROPE = Op(
    name="apply_rope",
    schema='(Tensor x, Tensor cos, Tensor sin, str layout="interleaved") -> Tensor',
    formula="(a cos - b sin, b cos + a sin) for pairs (a, b)",
    check=_check,
    allocate=lambda x, cos, sin, layout: (torch.empty_like(x),),
    reference=reference.apply_rope,
    exact=reference.APPLY_CHAINS,
    kernels=RopeKernel(query="x", key="", q_out="out", k_out=""),
    cases=cases.APPLY_ROPE,
    sized=cases.sized,
    inplace=("x",),
)

APPLY_ROPE_QK = Op(
    name="apply_rope_qk",
    schema="(Tensor query, Tensor key, Tensor cos, Tensor sin, "
    'str layout="interleaved") -> (Tensor, Tensor)',
    formula="apply_rope of query and key in one launch",
    outputs=("q_out", "k_out"),
    check=_check_qk,
    allocate=lambda query, key, *_: (torch.empty_like(query), torch.empty_like(key)),
    reference=reference.rope_qk,
    exact=reference.QK_CHAINS,
    kernels=RopeKernel(),
    cases=cases.APPLY_ROPE_QK,
    sized=cases.sized_qk,
    inplace=("query", "key"),
)


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
