"""Shapes of the gated linear units."""

from __future__ import annotations

from typing import Any

from ..case import Case, Inputs


def _glu(*shape: int, scale: float = 2.0, **more: Any) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        return {"input": inputs.normal(*shape, scale=scale), **more}

    return arguments


def _strided(**more: Any) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        return {"input": inputs.normal(2, 5, 200)[..., 16:144], **more}

    return arguments


def _offset(**more: Any) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        return {"input": inputs.normal(3 * 64 + 3)[3:].view(3, 64), **more}

    return arguments


def _all(first: dict[str, Any], other: dict[str, Any]) -> list[Case]:
    return [
        Case("rows", _glu(2, 3, 128, **first)),
        Case("other half", _glu(2, 3, 128, **other)),
        Case("odd width", _glu(3, 82, **first)),
        Case("width 2", _glu(3, 2, **first)),
        Case("large values", _glu(3, 64, scale=60.0, **first)),
        Case("slice", _strided(**first)),
        Case("storage offset", _offset(**first)),
        Case("no rows", _glu(0, 64, **first)),
    ]


_TANH, _ERF = (
    {"approximate": True, "gate": "second"},
    {"approximate": False, "gate": "second"},
)
GEGLU = [
    *_all(_TANH, {"approximate": True, "gate": "first"}),
    Case("erf", _glu(2, 3, 320, **_ERF)),
    Case("ltx 2x2688x2048", _glu(2, 2688, 4096, **_TANH), True, "ltx"),
    Case("sdxl 2x4096x2560", _glu(2, 4096, 5120, **_ERF), True, "sdxl"),
    Case("flux 4608x3072", _glu(4608, 6144, **_TANH), True, "flux"),
]
SWIGLU = [
    *_all({"gate": "first"}, {"gate": "second"}),
    Case("ltx 2x2688x2048", _glu(2, 2688, 4096, gate="first"), True, "ltx"),
    Case("flux 4608x3072", _glu(4608, 6144, gate="first"), True, "flux"),
    Case("llama 4096x14336", _glu(4096, 28672, gate="first"), True, "llama"),
]


def _pair(*shape: int, scale: float = 2.0) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        return {name: inputs.normal(*shape, scale=scale) for name in ("gate", "up")}

    return arguments


def _halves(inputs: Inputs) -> dict[str, Any]:
    gate, up = inputs.normal(2, 5, 256).chunk(2, dim=-1)
    return {"gate": gate, "up": up}


def _apart(inputs: Inputs) -> dict[str, Any]:
    return {"gate": inputs.normal(2, 5, 200)[..., 16:80], "up": inputs.normal(2, 5, 64)}


def _unaligned(inputs: Inputs) -> dict[str, Any]:
    return {"gate": inputs.normal(3, 64), "up": inputs.normal(3 * 64 + 3)[3:].view(3, 64)}


def _spread(inputs: Inputs) -> dict[str, Any]:
    return {"gate": inputs.normal(2, 5, 64), "up": inputs.normal(2, 1, 64).expand(-1, 5, -1)}


def _heads_first(inputs: Inputs) -> dict[str, Any]:
    gate, up = (inputs.normal(2, 3, 5, 64).transpose(1, 2) for _ in "gu")
    return {"gate": gate, "up": up}


SILU_MUL = [
    Case("rows", _pair(2, 3, 64)),
    Case("odd width", _pair(3, 41)),
    Case("width 1", _pair(3, 1)),
    Case("large values", _pair(3, 64, scale=60.0)),
    Case("halves of one tensor", _halves),
    Case("rows apart", _apart),
    Case("storage offset", _unaligned),
    Case("expanded", _spread),
    Case("transposed", _heads_first),
    Case("no rows", _pair(0, 64)),
    Case("llama 4096x14336", _pair(4096, 14336), True, "llama"),
    Case("llama, a token", _pair(1, 14336), True, "llama"),
    Case("qwen3 4096x12288", _pair(4096, 12288), True, "qwen3"),
]


def _formed(pair: Any, approximate: bool) -> Any:
    return lambda inputs: {**pair(inputs), "approximate": approximate}


GELU_MUL = [
    Case(f"{case.name}, {name}", _formed(case.arguments, approximate))
    for name, approximate in (("tanh", True), ("erf", False))
    for case in SILU_MUL
    if not case.large
]


def sized_geglu(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    return _glu(rows, 2 * width, **_ERF)(inputs)


def sized_swiglu(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    return _glu(rows, 2 * width, gate="first")(inputs)


def sized_silu_mul(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    return _pair(rows, width)(inputs)


def sized_gelu_mul(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    return _formed(_pair(rows, width), True)(inputs)
