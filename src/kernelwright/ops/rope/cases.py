"""Shapes of RoPE: tables as LTX, FLUX, Wan and Llama pass them, and the seed's grids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..case import Case, Inputs


def repeated(inputs: Inputs, *shape: int, layout: str) -> tuple[Tensor, Tensor]:
    """Full-width tables whose pairs share an angle, as models build them."""
    half = (*shape[:-1], shape[-1] // 2)
    if layout == "half":
        return tuple(torch.cat((t, t), -1) for t in inputs.angles(*half))  # type: ignore[return-value]
    return tuple(t.repeat_interleave(2, -1) for t in inputs.angles(*half))  # type: ignore[return-value]


def _one(x: tuple[int, ...], table: tuple[int, ...], layout: str, half_width: bool = False) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        if half_width:
            cos, sin = inputs.angles(*table[:-1], table[-1] // 2)
        else:
            cos, sin = repeated(inputs, *table, layout=layout)
        return {"x": inputs.normal(*x), "cos": cos, "sin": sin, "layout": layout}

    return arguments


def _packed(inputs: Inputs) -> dict[str, Any]:
    cos, sin = repeated(inputs, 5, 64, layout="interleaved")
    qkv = inputs.normal(2, 5, 3, 4, 64)
    return {"x": qkv[:, :, 1], "cos": cos, "sin": sin, "layout": "interleaved"}


def _low_precision_table(inputs: Inputs) -> dict[str, Any]:
    given = _one((2, 3, 7, 32), (2, 1, 7, 32), "half")(inputs)
    return given | {n: given[n].to(inputs.dtype) for n in ("cos", "sin")}


APPLY_ROPE = [
    Case("ltx", _one((2, 6, 128), (2, 6, 128), "interleaved")),
    Case("ltx, table of one batch", _one((2, 6, 192), (1, 6, 192), "interleaved")),
    Case("flux", _one((2, 6, 3, 64), (6, 64), "interleaved")),
    Case("wan", _one((2, 6, 3, 32), (1, 6, 1, 32), "interleaved")),
    Case("llama", _one((2, 3, 6, 64), (2, 1, 6, 64), "half")),
    Case("llama, table in the dtype of x", _low_precision_table),
    Case("half-width table", _one((2, 6, 3, 64), (6, 64), "interleaved", True)),
    Case("half-width table, half layout", _one((2, 6, 3, 64), (6, 64), "half", True)),
    Case("width 72", _one((2, 5, 3, 72), (5, 72), "half")),
    Case("width 10", _one((2, 5, 3, 10), (5, 10), "interleaved")),
    Case("width 2", _one((2, 5, 3, 2), (5, 2), "interleaved")),
    Case("packed qkv", _packed),
    Case("no tokens", _one((2, 0, 3, 64), (0, 64), "interleaved")),
    Case("ltx 2x2688x2048", _one((2, 2688, 2048), (1, 2688, 2048), "interleaved"), True, "ltx"),
    Case("flux 4608x24x128", _one((1, 4608, 24, 128), (4608, 128), "interleaved"), True, "flux"),
    Case("llama 32x4096x128", _one((1, 32, 4096, 128), (1, 1, 4096, 128), "half"), True, "llama"),
]


def _pair(query: tuple[int, ...], key: tuple[int, ...], table: tuple[int, ...], layout: str) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        cos, sin = repeated(inputs, *table, layout=layout)
        return {
            "query": inputs.normal(*query),
            "key": inputs.normal(*key),
            "cos": cos,
            "sin": sin,
            "layout": layout,
        }

    return arguments


APPLY_ROPE_QK = [
    Case("flux", _pair((2, 6, 4, 64), (2, 6, 4, 64), (6, 64), "interleaved")),
    Case("grouped query", _pair((2, 4, 6, 64), (2, 2, 6, 64), (2, 1, 6, 64), "half")),
    Case(
        "flux 4608x24x128",
        _pair((1, 4608, 24, 128), (1, 4608, 24, 128), (4608, 128), "interleaved"),
        True,
        "flux",
    ),
    Case(
        "llama 4096x32/8x128",
        _pair((1, 32, 4096, 128), (1, 8, 4096, 128), (1, 1, 4096, 128), "half"),
        True,
        "llama",
    ),
]


def _grid(tokens: int, heads: int, dim: int, layout: str = "interleaved", **grid: Any) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        return {
            "query": inputs.normal(2, tokens, heads, dim),
            "key": inputs.normal(2, tokens, heads, dim),
            "layout": layout,
            **grid,
        }

    return arguments


ROPE_1D = [
    Case("text", _grid(7, 2, 64, theta_base=1e4)),
    Case("half", _grid(7, 2, 64, "half", theta_base=5e5)),
    Case("llama 2x4096x32x128", _grid(4096, 32, 128, "half", theta_base=5e5), True, "llama"),
]
LTX = {"num_frames": 7, "height": 16, "width": 24}
ROPE_3D = [
    Case("video", _grid(24, 2, 64, num_frames=2, height=3, width=4)),
    Case("head of 128", _grid(24, 2, 128, "half", num_frames=2, height=3, width=4)),
    Case("ltx 2x2688x32x64", _grid(2688, 32, 64, **LTX), True, "ltx"),
]
ROPE_3D_EXTENDED = [
    Case(
        "shares",
        _grid(
            24, 2, 64, num_frames=2, height=3, width=4,
            rope_dim_t=16, rope_dim_h=24, rope_dim_w=24, theta_base_h=1e3,
        ),
    ),
    Case(
        "ltx 2x2688x32x64",
        _grid(2688, 32, 64, **LTX, rope_dim_t=24, rope_dim_h=20, rope_dim_w=20),
        True,
        "ltx",
    ),
]  # fmt: skip


def _layout(chain: str) -> str:
    return "half" if chain == "transformers" else "interleaved"


def sized(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    given = _one((1, rows, 1, width), (rows, width), _layout(chain))(inputs)
    return given | as_chain(given, inputs, chain)


def sized_qk(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    shape = (1, rows, 1, width)
    given = _pair(shape, shape, (rows, width), _layout(chain))(inputs)
    return given | as_chain(given, inputs, chain)


def as_chain(given: dict[str, Any], inputs: Inputs, chain: str) -> dict[str, Any]:
    """transformers passes its tables in the dtype of the model."""
    if chain != "transformers":
        return {}
    return {n: given[n].to(inputs.dtype) for n in ("cos", "sin")}
