"""RMSNorm of query and key, then RoPE, in one launch on a packed projection."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..op import Op
from ..rope.apply import check_tables
from ..rope.backward import RopeBackward
from ..rope.kernel import RopeKernel
from ..rope.reference import turned_rows
from . import cases, reference

__all__ = ["qk_norm_rope"]


def qk_norm_rope(
    query: Tensor,
    key: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
    across_heads: bool = False,
    layout: str = "interleaved",
    inplace: bool = False,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """q, k = rope(rmsnorm(query) * q_weight), rope(rmsnorm(key) * k_weight)

    Args:
        query, key: [B, S, heads, D], or [B, S, C] with across_heads; slices of a packed projection
            are read, and with `inplace` written, where they lie.
        q_weight, k_weight: [D], or [heads * D] with across_heads; both or neither.
        cos, sin: as in `apply_rope` over D, or over the whole row [.., heads * D] as in LTX; None
            leaves the rotation out.
        across_heads: normalise all heads of a token together (LTX, Wan) or each head (FLUX, Qwen3).
        layout: "interleaved" or "half".
        exact: "diffusers" (F.rms_norm, then rotation in float32 steps: LTX, FLUX; Wan with float32
            tables) or "transformers" (LlamaRMSNorm, then rotation in the dtype of x: Qwen3).

    >>> x = torch.ones(1, 1, 1, 2)
    >>> q, k = qk_norm_rope(x, x)
    """
    return QK_NORM_ROPE.run(
        query,
        key,
        q_weight,
        k_weight,
        cos,
        sin,
        eps,
        across_heads,
        layout,
        inplace=inplace,
        exact=exact,
        backend=backend,
    )


def _check(
    query: Tensor,
    key: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    across_heads: bool,
    layout: str,
) -> None:
    op = "qk_norm_rope"
    checks.choice(op, "across_heads", across_heads, (True, False))
    dims = (3, 4) if across_heads else (4,)
    for name, t in (("query", query), ("key", key)):
        checks.tensor(op, name, t)
        if t.ndim not in dims:
            wanted = "[B, S, heads, D] or [B, S, C]" if across_heads else "[B, S, heads, D]"
            raise ValueError(f"{op}: {name} has shape {list(t.shape)}, expected {wanted}")
    if key.dtype != query.dtype:
        raise TypeError(f"{op}: key is {key.dtype}, query is {query.dtype}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{op}: key has head dimension {key.shape[-1]}, query has {query.shape[-1]}"
        )
    if (q_weight is None) != (k_weight is None):
        missing = "q_weight" if q_weight is None else "k_weight"
        raise ValueError(f"{op}: {missing} is None while the other is not")
    checks.one_dtype(op, {"q_weight": q_weight, "k_weight": k_weight})
    for name, weight, t in (("q_weight", q_weight, query), ("k_weight", k_weight, key)):
        width = t.shape[2:].numel() if across_heads else t.shape[-1]
        checks.vector(op, name, weight, width, name[0] + "uery" if name[0] == "q" else "key")
    checks.choice(op, "layout", layout, ("interleaved", "half"))
    if (cos is None) != (sin is None):
        raise ValueError(f"{op}: {'cos' if cos is None else 'sin'} is None while the other is not")
    if cos is None or sin is None:
        if query.shape[-1] % 2:
            raise ValueError(f"{op}: query has width {query.shape[-1]}, expected an even one")
        return
    checks.tensor(op, "cos", cos, min_dims=2)
    for name, t in (("query", query), ("key", key)):
        row = turned_rows(t, cos, across_heads)
        check_tables(op, name, row, cos, sin, layout, row.shape[-1])


_ROW = RopeKernel(q_weight="q_weight", k_weight="k_weight", norm=True)
QK_NORM_ROPE = Op(
    name="qk_norm_rope",
    schema="(Tensor query, Tensor key, Tensor? q_weight=None, Tensor? k_weight=None, "
    "Tensor? cos=None, Tensor? sin=None, float eps=1e-6, bool across_heads=False, "
    'str layout="interleaved") -> (Tensor, Tensor)',
    formula="rope(rmsnorm(query) · q_weight), rope(rmsnorm(key) · k_weight)",
    outputs=("q_out", "k_out"),
    check=_check,
    allocate=lambda query, key, *_: (torch.empty_like(query), torch.empty_like(key)),
    reference=reference.qk_norm_rope,
    exact=reference.CHAINS,
    kernels=_ROW,
    backward=RopeBackward(_ROW),
    cases=cases.QK_NORM_ROPE,
    # on H200, us, CUDA and Triton: 37 and 47 at 2x2688x2048, 113 and 131 at 32760x1536; per head 31
    # and 35 at 4608x48x128, 25 and 27 at 4096x40x128
    prefer=("cuda", "triton"),
    sized=cases.sized,
    inplace=("query", "key"),
)
