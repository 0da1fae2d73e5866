"""The VAE of LTX-Video: every norm in its blocks is one kernel with the SiLU after it.

The norms before the last convolutions are in the forward of the encoder and decoder themselves,
which are too expensive to run twice for first sight; `generic` replaces these, without their SiLU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from ..fusions import Fusions
from ..fusions.channel_norms import NOT_EXACT
from ._recipe import Forward, Patch, Recipe


def block(fuse: Fusions) -> Forward:
    def forward(
        self: Any, inputs: Tensor, temb: Tensor | None = None, generator: Generator | None = None
    ) -> Tensor:
        shift_1 = scale_1 = shift_2 = scale_2 = None
        if self.scale_shift_table is not None:
            assert temb is not None
            table = self.scale_shift_table[None, ..., None, None, None]
            shift_1, scale_1, shift_2, scale_2 = (temb.unflatten(1, (4, -1)) + table).unbind(dim=1)
        activation = self.nonlinearity
        y = self.conv1(fuse.channel_norm_silu(self.norm1, activation, inputs, scale_1, shift_1))
        y = with_noise(y, self.per_channel_scale1, generator)
        y = fuse.channel_norm_silu(self.norm2, activation, y, scale_2, shift_2)
        y = self.conv2(self.dropout(y))
        y = with_noise(y, self.per_channel_scale2, generator)
        if self.norm3 is not None:
            inputs = self.norm3(inputs.movedim(1, -1)).movedim(-1, 1)
        if self.conv_shortcut is not None:
            inputs = self.conv_shortcut(inputs)
        return y + inputs

    return forward


def with_noise(x: Tensor, strength: Tensor | None, generator: Generator | None) -> Tensor:
    """x + noise * strength: the noise is [H, W], the strength is per channel."""
    if strength is None:
        return x
    noise = torch.randn(x.shape[-2:], generator=generator, device=x.device, dtype=x.dtype)[None]
    return x + (noise * strength)[None, :, None, ...]


RECIPE = Recipe(
    family="LTX-Video VAE",
    patches=(
        Patch(
            "diffusers.models.autoencoders.autoencoder_kl_ltx.LTXVideoResnetBlock3d",
            block,
            "norm over channels + SiLU",
            covers=("norm1", "norm2"),
            sources=("LTXVideoResnetBlock3d.forward",),
            written_for=("054b72c11453",),
            not_exact=NOT_EXACT,
        ),
    ),
)
