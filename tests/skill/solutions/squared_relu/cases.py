"""Shapes: small ones for tests, those of models for benchmarks."""

from __future__ import annotations

from typing import Any

from kernelwright.ops.case import Case, Inputs


def _of(*shape: int, scale: float = 2.0) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        return {"input": inputs.normal(*shape, scale=scale)}

    return arguments


def _slice(inputs: Inputs) -> dict[str, Any]:
    return {"input": inputs.normal(2, 5, 192)[..., 64:128]}


def _transposed(inputs: Inputs) -> dict[str, Any]:
    return {"input": inputs.normal(2, 3, 5, 48).transpose(1, 2)}


def _expanded(inputs: Inputs) -> dict[str, Any]:
    return {"input": inputs.normal(1, 7, 40).expand(3, 7, 40)}


def _offset(inputs: Inputs) -> dict[str, Any]:
    """Storage that starts three elements late: no vector access is aligned."""
    return {"input": inputs.normal(3 * 64 + 3)[3:].view(3, 64)}


CASES = [
    Case("rows", _of(2, 3, 64)),
    Case("vector", _of(96)),
    Case("width 1", _of(3, 1)),
    Case("odd width", _of(3, 41)),
    Case("large values", _of(3, 64, scale=30.0)),
    Case("slice", _slice),
    Case("transposed", _transposed),
    Case("expanded", _expanded),
    Case("storage offset", _offset),
    Case("no rows", _of(0, 64)),
    Case("ltx 2x2688x2048", _of(2, 2688, 2048), True, "ltx"),
    Case("flux 4608x3072", _of(4608, 3072), True, "flux"),
]


def sized(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    return _of(rows, width)(inputs)
