"""Shapes of RMSNorm: the seed's five, the models', and those that broke others."""

from __future__ import annotations

from typing import Any

from ..case import Case, Inputs

SEED = ((1, 1024, 2048), (2, 1024, 2048), (4, 1024, 2048), (2, 4096, 3072), (4, 4096, 3072))
MODELS = {
    "ltx": ((2, 2688, 2048),),
    "flux": ((4608, 3072), (4608, 24, 128)),
    "llama": ((4096, 4096),),
    "wan": ((32760, 1536),),
}
ODD_WIDTHS = (1, 33, 41, 65, 123, 513, 769, 1001, 1152, 3072)


def _norm(*shape: int, weighted: bool = True, scale: float = 1.0) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        return {
            "input": inputs.normal(*shape, scale=scale),
            "weight": inputs.weight(shape[-1]) if weighted else None,
            "eps": 1e-6,
        }

    return arguments


def _packed(inputs: Inputs) -> dict[str, Any]:
    """The key of a packed QKV: rows of 64 inside rows of 192."""
    return {
        "input": inputs.normal(2, 5, 192)[..., 64:128],
        "weight": inputs.weight(64),
        "eps": 1e-6,
    }


def _transposed(inputs: Inputs) -> dict[str, Any]:
    return {"input": inputs.normal(3, 4, 5, 48).transpose(1, 2), "weight": None, "eps": 1e-5}


def _expanded(inputs: Inputs) -> dict[str, Any]:
    return {
        "input": inputs.normal(1, 7, 40).expand(3, 7, 40),
        "weight": inputs.weight(40),
        "eps": 1e-6,
    }


def _offset(inputs: Inputs) -> dict[str, Any]:
    """Storage that starts one element late: no vector access is aligned."""
    return {
        "input": inputs.normal(3 * 64 + 1)[1:].view(3, 64),
        "weight": inputs.weight(65)[1:],
        "eps": 1e-6,
    }


def _strided_columns(inputs: Inputs) -> dict[str, Any]:
    return {"input": inputs.normal(4, 96)[:, ::2], "weight": inputs.weight(48), "eps": 1e-6}


RMSNORM = [
    Case("rows", _norm(2, 3, 64)),
    Case("no weight", _norm(2, 3, 128, weighted=False)),
    Case("one row", _norm(1, 2048)),
    Case("vector", _norm(96)),
    Case("large values", _norm(3, 256, scale=300.0)),
    *(Case(f"width {n}", _norm(3, n)) for n in ODD_WIDTHS),
    Case("packed qkv", _packed),
    Case("transposed", _transposed),
    Case("expanded", _expanded),
    Case("storage offset", _offset),
    Case("strided columns", _strided_columns),
    Case("no rows", _norm(0, 64)),
    Case("no tokens", _norm(3, 0, 64)),
    Case("no width", _norm(3, 0)),
    *(Case(f"seed {'x'.join(map(str, s))}", _norm(*s), True, "seed") for s in SEED),
    *(
        Case(f"{preset} {'x'.join(map(str, s))}", _norm(*s), True, preset)
        for preset, shapes in MODELS.items()
        for s in shapes
    ),
]


def _residual(*shape: int, weighted: bool = True) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        return {
            "input": inputs.normal(*shape),
            "residual": inputs.normal(*shape),
            "weight": inputs.weight(shape[-1]) if weighted else None,
            "eps": 1e-6,
        }

    return arguments


def _residual_packed(inputs: Inputs) -> dict[str, Any]:
    return {
        "input": inputs.normal(2, 5, 192)[..., 64:128],
        "residual": inputs.normal(2, 5, 64),
        "weight": inputs.weight(64),
        "eps": 1e-6,
    }


RMSNORM_RESIDUAL = [
    Case("rows", _residual(2, 3, 64)),
    Case("no weight", _residual(2, 3, 1152, weighted=False)),
    Case("odd width", _residual(3, 123)),
    Case("packed input", _residual_packed),
    Case("no rows", _residual(0, 64)),
    Case("ltx 2x2688x2048", _residual(2, 2688, 2048), True, "ltx"),
    Case("flux 4608x3072", _residual(4608, 3072), True, "flux"),
    Case("llama 4096x4096", _residual(4096, 4096), True, "llama"),
]


def sized(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    return _norm(rows, width)(inputs)


def sized_residual(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    return _residual(rows, width)(inputs)
