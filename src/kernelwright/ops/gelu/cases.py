"""Shapes of GELU: the hidden layers of the models' feed-forwards, and odd small ones."""

from __future__ import annotations

from typing import Any

from ..case import Case, Inputs


def _rows(*shape: int, scale: float = 2.0, approximate: bool = True) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        return {"input": inputs.normal(*shape, scale=scale), "approximate": approximate}

    return arguments


def _strided(inputs: Inputs) -> dict[str, Any]:
    return {"input": inputs.normal(2, 5, 200)[..., 16:144], "approximate": True}


def _offset(inputs: Inputs) -> dict[str, Any]:
    return {"input": inputs.normal(3 * 64 + 3)[3:].view(3, 64), "approximate": True}


def _heads_first(inputs: Inputs) -> dict[str, Any]:
    return {"input": inputs.normal(2, 3, 5, 64).transpose(1, 2), "approximate": True}


GELU = [
    Case("rows", _rows(2, 3, 128)),
    Case("erf", _rows(2, 3, 128, approximate=False)),
    Case("odd width", _rows(3, 41)),
    Case("width 1", _rows(3, 1)),
    Case("large values", _rows(3, 64, scale=60.0)),
    Case("small values", _rows(3, 64, scale=1e-3)),
    Case("slice", _strided),
    Case("storage offset", _offset),
    Case("transposed", _heads_first),
    Case("no rows", _rows(0, 64)),
    Case("ltx 2x2688x8192", _rows(2, 2688, 8192), True, "ltx"),
    Case("flux 4608x12288", _rows(4608, 12288), True, "flux"),
    Case("sd3.5 2x4096x6144", _rows(2, 4096, 6144), True, "sd3.5"),
    Case("erf 4096x18176", _rows(4096, 18176, approximate=False), True, "falcon"),
]


def sized(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    return _rows(rows, width)(inputs)
