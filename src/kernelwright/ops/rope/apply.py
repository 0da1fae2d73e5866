"""Rotary embedding with given cos and sin tables."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..op import Op
from . import cases, reference
from .backward import RopeBackward
from .kernel import RopeKernel
from .tables import over_rows

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
    return APPLY_ROPE.run(x, cos, sin, layout, inplace=inplace, exact=exact, backend=backend)


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
    return APPLY_ROPE_QK.run(
        query, key, cos, sin, layout, inplace=inplace, exact=exact, backend=backend
    )


def check_tables(
    op: str, name: str, x: Tensor, cos: Tensor, sin: Tensor, layout: str, width: int
) -> None:
    """Check that the tables have D or D/2 columns and broadcast over the leading dims of x."""
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


_ROWS = RopeKernel(query="x", key="", q_out="out", k_out="")
APPLY_ROPE = Op(
    name="apply_rope",
    schema='(Tensor x, Tensor cos, Tensor sin, str layout="interleaved") -> Tensor',
    formula="(a cos - b sin, b cos + a sin) for pairs (a, b)",
    check=_check,
    allocate=lambda x, cos, sin, layout: (torch.empty_like(x),),
    reference=reference.apply_rope,
    exact=reference.APPLY_CHAINS,
    kernels=_ROWS,
    backward=RopeBackward(_ROWS),
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
    backward=RopeBackward(RopeKernel()),
    cases=cases.APPLY_ROPE_QK,
    sized=cases.sized_qk,
    inplace=("query", "key"),
)
