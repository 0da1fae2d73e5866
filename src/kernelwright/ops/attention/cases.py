"""Shapes of attention: the models', and small ones for every kind of call."""

from __future__ import annotations

from typing import Any

import torch

from ..case import Case, Inputs

# [batch, query heads, key heads, queries, keys, head_dim]
MODELS = {
    "ltx": ((2, 32, 32, 2688, 2688, 64), (2, 32, 32, 8064, 8064, 64), (2, 32, 32, 2688, 128, 64)),
    "flux": ((1, 24, 24, 4608, 4608, 128),),
    "sd3.5": ((2, 24, 24, 4429, 4429, 64),),
    "wan": ((1, 12, 12, 32760, 32760, 128),),
}


def _plain(
    batch: int,
    heads: int,
    groups: int,
    queries: int,
    keys: int,
    head_dim: int,
    mask: str = "none",
    causal: bool = False,
    scale: float | None = None,
) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        return {
            "query": inputs.normal(batch, heads, queries, head_dim),
            "key": inputs.normal(batch, groups, keys, head_dim),
            "value": inputs.normal(batch, groups, keys, head_dim),
            "mask": _mask(inputs, mask, batch, heads, queries, keys),
            "scale": scale,
            "causal": causal,
        }

    return arguments


def _mask(inputs: Inputs, kind: str, batch: int, heads: int, queries: int, keys: int) -> Any:
    if kind == "none":
        return None
    if kind == "bias":
        return inputs.normal(1, heads, queries, keys)
    if kind == "padding":
        # one batch entry sees all keys, the next two thirds of them
        last = torch.tensor([keys - (b % 2) * (keys // 3) for b in range(batch)])
        seen = torch.arange(keys) < last[:, None]
        return seen[:, None, None, :].to(inputs.device)
    # every third query sees nothing
    rows = torch.arange(queries)[:, None] % 3 != 1
    seen = rows & (torch.arange(keys)[None, :] % 4 != 2)
    return seen.to(inputs.device)


def _packed(inputs: Inputs) -> dict[str, Any]:
    """Query, key and value as views of one packed projection."""
    qkv = inputs.normal(2, 37, 3, 2, 64).permute(2, 0, 3, 1, 4)
    return {
        "query": qkv[0],
        "key": qkv[1],
        "value": qkv[2],
        "mask": None,
        "scale": None,
        "causal": False,
    }


def _name(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


ATTENTION = (
    Case("square", _plain(1, 2, 2, 40, 40, 64)),
    Case("cross", _plain(2, 2, 2, 33, 70, 64)),
    Case("many_blocks", _plain(1, 1, 1, 150, 300, 16)),
    Case("causal", _plain(1, 2, 2, 70, 70, 32, causal=True)),
    Case("causal_cross", _plain(1, 1, 1, 20, 150, 64, causal=True)),
    Case("grouped", _plain(1, 4, 2, 33, 33, 64, causal=True)),
    Case("head_dim_72", _plain(1, 2, 2, 17, 40, 72)),
    Case("head_dim_80", _plain(1, 1, 1, 17, 40, 80, mask="padding")),
    Case("head_dim_13", _plain(1, 1, 1, 9, 21, 13)),
    Case("head_dim_256", _plain(1, 1, 1, 9, 21, 256)),
    Case("padding", _plain(2, 2, 2, 33, 70, 64, mask="padding")),
    Case("blind_rows", _plain(1, 2, 2, 33, 70, 64, mask="blind")),
    Case("bias", _plain(1, 2, 2, 33, 70, 64, mask="bias")),
    Case("bias_causal", _plain(1, 2, 1, 33, 33, 64, mask="bias", causal=True)),
    Case("one_query", _plain(2, 2, 2, 1, 70, 64)),
    Case("one_key", _plain(1, 2, 2, 7, 1, 64)),
    Case("negative_scale", _plain(1, 1, 1, 17, 33, 32, scale=-0.2, causal=True)),
    Case("packed", _packed),
    Case("no_queries", _plain(1, 2, 2, 0, 7, 64)),
    Case("no_keys", _plain(1, 2, 2, 7, 0, 64)),
    Case("no_batch", _plain(0, 2, 2, 7, 7, 64)),
    *(
        Case(f"{model}_{_name(shape)}", _plain(*shape), large=True, preset=model)
        for model, shapes in MODELS.items()
        for shape in shapes
    ),
    Case(
        "ltx_padded",
        _plain(2, 32, 32, 2688, 128, 64, mask="padding"),
        large=True,
        preset="ltx",
    ),
    Case("llama", _plain(1, 32, 8, 4096, 4096, 128, causal=True), large=True, preset="llama"),
)
