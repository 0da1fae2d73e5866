"""Shapes of tokens that are decoded into a static cache."""

from __future__ import annotations

from typing import Any

import torch

from ..case import Case, Inputs
from ..rope.cases import repeated


def step(
    batch: int,
    tokens: int,
    heads: tuple[int, int],
    dim: int,
    room: int,
    length: int,
    norm: bool = False,
    positions: int | None = None,
) -> Any:
    """`tokens` of each sequence, as slices of one packed projection, into a cache of `room`
    positions that holds `length`. `positions`: the batch of the tables."""

    def arguments(inputs: Inputs) -> dict[str, Any]:
        h, g = heads
        packed = inputs.normal(batch, tokens, (h + 2 * g) * dim)
        query, key, value = (
            t.unflatten(-1, (-1, dim)) for t in packed.split((h * dim, g * dim, g * dim), -1)
        )
        cos, sin = repeated(inputs, positions or batch, tokens, dim, layout="half")
        device = "meta" if inputs.device == "meta" else inputs.device
        return {
            "query": query,
            "key": key,
            "value": value,
            "q_weight": inputs.weight(dim) if norm else None,
            "k_weight": inputs.weight(dim) if norm else None,
            "cos": cos.to(inputs.dtype),
            "sin": sin.to(inputs.dtype),
            "keys": inputs.normal(batch, g, room, dim),
            "values": inputs.normal(batch, g, room, dim),
            "length": torch.tensor(length, device=device),
            "eps": 1e-6,
            "layout": "half",
        }

    return arguments


CASES = [
    Case("a token", step(1, 1, (4, 2), 64, 9, 3)),
    Case("three sequences", step(3, 1, (4, 2), 64, 9, 3)),
    Case("three sequences, one table", step(3, 1, (4, 2), 64, 9, 3, positions=1)),
    Case("into the last positions", step(2, 5, (8, 2), 128, 16, 11)),
    Case("an empty cache", step(2, 2, (2, 2), 32, 4, 0)),
    Case("heads of 16", step(2, 3, (4, 1), 16, 7, 2)),
    Case("heads of 80", step(1, 2, (4, 4), 80, 5, 1)),
    Case("norms", step(2, 1, (4, 4), 128, 6, 4, norm=True)),
    Case("llama, a token", step(1, 1, (32, 8), 128, 1024, 700), True, "llama"),
    Case("llama, eight tokens", step(8, 1, (32, 8), 128, 1024, 700), True, "llama"),
    Case("llama, 16 tokens of 8", step(8, 16, (32, 8), 128, 1024, 700), True, "llama"),
]


def sized(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
    return step(1, rows, (1, 1), width, rows + 1, 1)(inputs)
