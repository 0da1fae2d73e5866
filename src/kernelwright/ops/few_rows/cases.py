"""Shapes of linear layers with few rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..case import Case, Inputs
from ..fp8 import reference as fp8
from .reference import quantize_to_integers


def layer(rows: int, n: int, k: int, bias: bool = False, glu: bool = False) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        x, weight = inputs.normal(rows, k), inputs.normal(n, k, scale=k**-0.5)
        return {"x": x, "weight": weight, "bias": inputs.normal(n) if bias else None, "glu": glu}

    return arguments


def eight(
    rows: int,
    n: int,
    k: int,
    bias: bool = False,
    glu: bool = False,
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]] = fp8.quantize,
) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        given = layer(rows, n, k, bias, glu)(inputs)
        weight, scale = quantize(given["weight"])
        return given | {"weight": weight, "scale": scale}

    return arguments


integers = partial(eight, quantize=quantize_to_integers)


def _of_a_token(made: Any) -> list[Case]:
    return [
        Case("a row", made(1, 64, 256)),
        Case("two rows, bias", made(2, 96, 512, bias=True)),
        Case("odd number of outputs", made(2, 37, 272, bias=True)),
        Case("rows narrower than a warp's load", made(1, 16, 48)),
        Case("gate and up", made(1, 128, 512, glu=True)),
        Case("two rows, gate and up", made(2, 74, 528, glu=True)),
        Case("llama, QKV of a token", made(1, 6144, 4096), True, "llama"),
        Case("llama, gate and up of a token", made(1, 28672, 4096, glu=True), True, "llama"),
        Case("llama, down of a token", made(1, 4096, 14336), True, "llama"),
    ]


CASES = _of_a_token(layer)
EIGHT_BIT_CASES = [
    *_of_a_token(eight),
    Case("three rows, bias", eight(3, 96, 512, bias=True)),
    Case("eight rows", eight(8, 64, 1024)),
    Case("five rows, gate and up", eight(5, 74, 528, glu=True)),
    Case("sixteen rows", eight(16, 48, 320)),
    Case("nine rows, odd number of outputs, bias", eight(9, 37, 656, bias=True)),
    Case("twelve rows, gate and up", eight(12, 74, 1552, glu=True)),
    Case("a row, integers, bias", integers(1, 96, 272, bias=True)),
    Case("three rows, integers, odd number of outputs, bias", integers(3, 37, 528, bias=True)),
    Case("twelve rows, integers", integers(12, 48, 320)),
    Case("flux, modulation", integers(1, 18432, 3072, bias=True), True, "flux"),
    Case("qwen-image, modulation of two", integers(2, 18432, 3072, bias=True), True, "qwen"),
    Case("llama, down of eight tokens", eight(8, 4096, 14336), True, "llama"),
    Case("llama, gate and up of 16 tokens", eight(16, 28672, 4096, glu=True), True, "llama"),
]


def sized(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    return layer(min(rows, 2), width, width)(inputs)


def sized_eight(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    return eight(min(rows, 16), width, width)(inputs)
