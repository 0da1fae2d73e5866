"""Shapes of QK-norm with RoPE, on packed projections as the models have them."""

from __future__ import annotations

from typing import Any

from ..case import Case, Inputs
from ..rope.cases import as_chain, repeated


def _packed(
    tokens: tuple[int, int],
    heads: tuple[int, int],
    dim: int,
    table: tuple[int, ...] | None,
    layout: str = "interleaved",
    across: bool = False,
    table_dtype: bool = False,
    flat: bool = False,
) -> Any:
    """query and key as slices of one [B, S, (q + 2 kv heads) * D] projection."""

    def arguments(inputs: Inputs) -> dict[str, Any]:
        q_width, k_width = heads[0] * dim, heads[1] * dim
        qkv = inputs.normal(*tokens, q_width + 2 * k_width)
        query, key, _ = qkv.split((q_width, k_width, k_width), dim=-1)
        if not flat:
            query, key = query.unflatten(2, (heads[0], dim)), key.unflatten(2, (heads[1], dim))
        cos, sin = repeated(inputs, *table, layout=layout) if table else (None, None)
        if cos is not None and table_dtype:
            cos, sin = cos.to(inputs.dtype), sin.to(inputs.dtype)
        return {
            "query": query,
            "key": key,
            "q_weight": inputs.weight(q_width if across else dim),
            "k_weight": inputs.weight(k_width if across else dim),
            "cos": cos,
            "sin": sin,
            "eps": 1e-6,
            "across_heads": across,
            "layout": layout,
        }

    return arguments


QK_NORM_ROPE = [
    Case("ltx", _packed((2, 5), (4, 4), 32, (1, 5, 128), across=True, flat=True)),
    Case("ltx, heads apart", _packed((2, 5), (4, 4), 32, (5, 128), across=True)),
    Case("ltx cross-attention", _packed((2, 5), (4, 4), 32, None, across=True, flat=True)),
    Case("wan", _packed((2, 5), (3, 3), 32, (1, 5, 1, 32), across=True)),
    Case("flux", _packed((2, 5), (4, 4), 64, (5, 64))),
    Case("qwen3", _packed((2, 5), (4, 2), 128, (2, 5, 128), "half", table_dtype=True)),
    Case("width 72", _packed((2, 5), (3, 3), 72, (5, 72), "half")),
    Case("no tokens", _packed((2, 0), (4, 4), 64, (0, 64))),
    Case(
        "ltx 2x2688x2048",
        _packed((2, 2688), (32, 32), 64, (1, 2688, 2048), across=True, flat=True),
        True,
        "ltx",
    ),
    Case("flux 4608x24x128", _packed((1, 4608), (24, 24), 128, (4608, 128)), True, "flux"),
    Case(
        "qwen3 4096x32/8x128",
        _packed((1, 4096), (32, 8), 128, (1, 4096, 128), "half", table_dtype=True),
        True,
        "llama",
    ),
    Case(
        "wan 32760x12x128",
        _packed((1, 32760), (12, 12), 128, (1, 32760, 1, 128), across=True),
        True,
        "wan",
    ),
]


def sized(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    """One head a token, so that the norm sees `rows` rows."""
    layout = "half" if chain == "transformers" else "interleaved"
    made = _packed((1, rows), (1, 1), width, (rows, width), layout)(inputs)
    return made | as_chain(made, inputs, chain)
