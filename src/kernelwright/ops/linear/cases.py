"""Shapes of Linear + GELU: the feed-forward layers of the models, and odd small ones."""

from __future__ import annotations

from typing import Any

from ..case import Case, Inputs

# rows, width in, width out of the first linear layer of the feed-forward
MODELS = {
    "ltx": (5376, 2048, 8192),
    "flux": (4608, 3072, 12288),
    "sd3.5": (8192, 1536, 6144),
    "wan": (32760, 1536, 8960),
}


def _layer(
    *lead: int, inner: int, outer: int, biased: bool = True, approximate: bool = True
) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        return {
            "x": inputs.normal(*lead, inner),
            "weight": inputs.normal(outer, inner, scale=inner**-0.5),
            "bias": inputs.normal(outer) if biased else None,
            "approximate": approximate,
        }

    return arguments


def _strided(inputs: Inputs) -> dict[str, Any]:
    """The last third of wider rows, as a slice of a fused projection."""
    return {
        "x": inputs.normal(2, 5, 96)[..., 64:],
        "weight": inputs.normal(24, 32, scale=0.2),
        "bias": inputs.normal(24),
        "approximate": True,
    }


LINEAR_GELU = (
    Case("rows", _layer(2, 5, inner=32, outer=24)),
    Case("erf", _layer(2, 5, inner=32, outer=24, approximate=False)),
    Case("no_bias", _layer(7, inner=33, outer=17, biased=False)),
    Case("vector", _layer(inner=16, outer=8)),
    Case("four_dims", _layer(2, 3, 2, inner=16, outer=8)),
    Case("strided", _strided),
    Case("no_rows", _layer(0, inner=16, outer=8)),
    Case("no_outer", _layer(3, inner=16, outer=0)),
    *(
        Case(model, _layer(rows, inner=inner, outer=outer), large=True, preset=model)
        for model, (rows, inner, outer) in MODELS.items()
    ),
)
