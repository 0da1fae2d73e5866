"""Shapes: small ones for tests, those of models for benchmarks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernelwright.ops.case import Case, Inputs

EPS = 1e-6


def _given(input: Tensor, gate: Tensor, weight: Tensor | None) -> dict[str, Any]:
    return {"input": input, "gate": gate, "weight": weight, "eps": EPS}


def _of(*shape: int, weighted: bool = True, scale: float = 2.0) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        x, gate = (inputs.normal(*shape, scale=scale) for _ in range(2))
        return _given(x, gate, inputs.weight(shape[-1]) if weighted else None)

    return arguments


def _slice(inputs: Inputs) -> dict[str, Any]:
    gate, x = inputs.normal(2, 5, 256, scale=2.0).chunk(2, dim=-1)
    return _given(x, gate, inputs.weight(128))


def _transposed(inputs: Inputs) -> dict[str, Any]:
    x, gate = (inputs.normal(2, 3, 5, 48).transpose(1, 2) for _ in range(2))
    return _given(x, gate, None)


def _expanded(inputs: Inputs) -> dict[str, Any]:
    gate = inputs.normal(1, 7, 40).expand(3, 7, 40)
    return _given(inputs.normal(3, 7, 40), gate, inputs.weight(40))


def _offset(inputs: Inputs) -> dict[str, Any]:
    """Storage that starts one element late: no vector access is aligned."""
    x = inputs.normal(3 * 64 + 1)[1:].view(3, 64)
    return _given(x, inputs.normal(3, 64), inputs.weight(65)[1:])


CASES = [
    Case("rows", _of(2, 3, 64)),
    Case("many rows", _of(2, 20, 512)),
    Case("no weight", _of(2, 3, 128, weighted=False)),
    Case("vector", _of(96)),
    Case("large values", _of(3, 256, scale=20.0)),
    *(Case(f"width {n}", _of(3, n)) for n in (1, 33, 513, 1152)),
    Case("slice", _slice),
    Case("transposed", _transposed),
    Case("expanded", _expanded),
    Case("storage offset", _offset),
    Case("no rows", _of(0, 64)),
    Case("ltx 2x2688x2048", _of(2, 2688, 2048), True, "ltx"),
    Case("heads 4096x32x128", _of(4096, 32, 128), True, "llama"),
]


def sized(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    return _of(rows, width)(inputs)
