"""Shapes of the gated residuals: with every part, and with each left out."""

from __future__ import annotations

from typing import Any

from ..adaln.cases import MODULATIONS, WAN, in_float32, tokens
from ..case import Case, Inputs


def _residual(shape: tuple[int, int, int], how: str | None) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        gate = MODULATIONS[how](inputs, *shape)[2] if how else None
        return {"residual": inputs.normal(*shape), "x": inputs.normal(*shape), "gate": gate}

    return arguments


LTX, FLUX = (2, 2688, 2048), (1, 4608, 3072)
GATED_RESIDUAL = [
    *(Case(how, _residual((2, 6, 64), how)) for how in MODULATIONS),
    Case("no gate", _residual((2, 3, 1152), None)),
    Case("odd width", _residual((2, 3, 41), "[B, D]")),
    Case("no tokens", _residual((2, 0, 64), "[B, D]")),
    Case("ltx 2x2688x2048", _residual(LTX, "[B, 1, D] of unbind"), True, "ltx"),
    Case("flux 4608x3072", _residual(FLUX, "[B, D]"), True, "flux"),
]


def _norm(shape: tuple[int, int, int], how: str, parts: str, kind: str) -> Any:
    """`parts` lists what is there: g(ate), w(eight), b(ias), s(cale), h (shift)."""

    def arguments(inputs: Inputs) -> dict[str, Any]:
        scale, shift, gate = MODULATIONS[how](inputs, *shape)
        return {
            "residual": inputs.normal(*shape),
            "x": inputs.normal(*shape),
            "gate": gate if "g" in parts else None,
            "weight": inputs.weight(shape[-1]) if "w" in parts else None,
            "bias": inputs.normal(shape[-1]) if "b" in parts else None,
            "scale": scale if "s" in parts else None,
            "shift": shift if "h" in parts else None,
            "kind": kind,
            "eps": 1e-6,
        }

    return arguments


GATED_RESIDUAL_NORM = [
    *(Case(how, _norm((2, 6, 64), how, "gsh", "rms")) for how in MODULATIONS),
    Case("layer", _norm((2, 6, 64), "[B, D]", "gsh", "layer")),
    Case("everything", _norm((2, 3, 1152), "[B, D]", "gwbsh", "layer")),
    Case("no gate", _norm((2, 3, 96), "[D]", "wsh", "rms")),
    Case("norm only", _norm((2, 3, 123), "[D]", "", "rms")),
    Case("no tokens", _norm((2, 0, 64), "[B, D]", "gsh", "rms")),
    Case("ltx 2x2688x2048", _norm(LTX, "[B, 1, D] of unbind", "gsh", "rms"), True, "ltx"),
    Case("flux 4608x3072", _norm(FLUX, "[B, D]", "gsh", "layer"), True, "flux"),
    Case(
        "wan 32760x1536",
        in_float32(_norm(WAN, "[B, 1, D] of unbind", "gsh", "layer")),
        True,
        "wan",
    ),
]


def sized(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    return _residual(tokens(rows, width), "[B, 1, D] of unbind")(inputs)


def sized_norm(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    kind = "layer" if chain == "wan" else "rms"
    return _norm(tokens(rows, width), "[B, 1, D] of unbind", "gsh", kind)(inputs)
