"""The text projection of LTX-Video, PixArt and related models: once per prompt."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..fusions import Fusions, hooked_now
from ._recipe import Forward, Patch, Recipe


def projection(fuse: Fusions) -> Forward:
    def forward(self: Any, caption: Tensor) -> Tensor:
        def make() -> Tensor:
            return type(self).forward(self, caption)

        if hooked_now(self.act_1):
            return make()
        return fuse.once_per_prompt(self, caption, (self.linear_1, self.linear_2), make)

    return forward


RECIPE = Recipe(
    family="text projections of diffusers",
    generic=True,
    patches=(
        Patch(
            "diffusers.models.embeddings.PixArtAlphaTextProjection",
            projection,
            "computed once per prompt",
            sources=("PixArtAlphaTextProjection.forward",),
            written_for=("561e253ab8f0",),
        ),
    ),
)
