"""Shapes of LayerNorm; a large mean tells a kernel that sums squares from one that does not."""

from __future__ import annotations

from typing import Any

from ..case import Case, Inputs


def _norm(*shape: int, weight: bool = True, bias: bool = True, mean: float = 0.0) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        return {
            "input": inputs.normal(*shape, mean=mean),
            "weight": inputs.weight(shape[-1]) if weight else None,
            "bias": inputs.normal(shape[-1]) if bias else None,
            "eps": 1e-5,
        }

    return arguments


LAYERNORM = [
    Case("rows", _norm(2, 3, 64)),
    Case("plain", _norm(2, 3, 128, weight=False, bias=False)),
    Case("weight only", _norm(5, 1152, bias=False)),
    Case("bias only", _norm(5, 96, weight=False)),
    Case("narrow", _norm(5, 96)),
    # PyTorch's 128 threads do not get as many elements each
    Case("uneven, one warp", _norm(7, 80)),
    Case("uneven, two warps", _norm(7, 160, weight=False, bias=False)),
    Case("uneven, last turn", _norm(2, 3, 2240, weight=False, bias=False)),
    Case("odd width, mean 100", _norm(3, 769, mean=100.0)),
    Case("mean 10000", _norm(3, 513, mean=1e4)),
    Case("no rows", _norm(0, 64)),
    Case("no width", _norm(3, 0)),
    Case("ltx 2x2688x2048", _norm(2, 2688, 2048, weight=False, bias=False), True, "ltx"),
    Case("flux 4608x3072", _norm(4608, 3072, weight=False, bias=False), True, "flux"),
    Case("affine 4608x3072", _norm(4608, 3072), True, "flux"),
]


def sized(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    return _norm(rows, width)(inputs)
