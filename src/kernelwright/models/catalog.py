"""Presets by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from .. import close_names
from . import flux, hunyuan, image, image_llm, language, unet, video, video_audio
from .preset import Preset


def presets() -> dict[str, Preset]:
    """Every preset, by name."""
    return dict(_by_name())


def build(
    name: str,
    *,
    tiny: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    seed: int = 0,
    layers: int | None = None,
) -> nn.Module:
    """A preset's model with random weights, in eval mode and with the dtypes of `from_pretrained`.

    Weights are drawn on `device`; "meta" gives the structure without memory, at any size. `layers`
    builds at most so many layers of each kind of block, at full width; `inputs` stay the same. The
    random state of torch is unchanged.

    >>> build("flux-dev", device="meta").config.num_layers
    19
    >>> build("flux-dev", device="meta", layers=4).config.num_single_layers
    4
    """
    return preset(name).build(tiny=tiny, dtype=dtype, device=device, seed=seed, layers=layers)


def inputs(
    name: str,
    *,
    tiny: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    seed: int = 0,
    **sizes: int,
) -> dict[str, Any]:
    """Arguments of one forward of a preset, `model(**inputs)`, as its own pipeline passes them.

    `sizes` change the preset's defaults: batch, height and width in pixels, frames, text, tokens.

    >>> inputs("ltx-video", frames=9, height=64, width=64)["hidden_states"].shape
    torch.Size([2, 8, 128])
    """
    return preset(name).inputs(tiny=tiny, dtype=dtype, device=device, seed=seed, **sizes)


def preset(name: str) -> Preset:
    """One preset; a ValueError that suggests the nearest names if there is none."""
    if name not in _by_name():
        raise ValueError(f"no preset {name!r}; {suggestion(name)}")
    return _by_name()[name]


def suggestion(name: str) -> str:
    """The presets whose names are similar to `name`, or the command that lists them."""
    return close_names.suggestion(name, _by_name(), "kernelwright models")


FAMILIES = {
    "Video": (video, hunyuan, video_audio),
    "Image": (flux, image, image_llm),
    "U-Net": (unet,),
    "Language": (language,),
}


def family_of(name: str) -> str:
    """What kind of model a preset is: "Video", "Image", "U-Net", "Language"; "Other" if none."""
    for family, files in FAMILIES.items():
        if any(preset.name == name for file in files for preset in file.PRESETS):
            return family
    return "Other"


@cache
def _by_name() -> dict[str, Preset]:
    files = (file for family in FAMILIES.values() for file in family)
    return {preset.name: preset for file in files for preset in file.PRESETS}


def table() -> Any:
    """The presets for a terminal: the model and its library, and the size of one forward."""
    from rich.table import Table
    from rich.text import Text

    shown = Table.grid(padding=(0, 2, 0, 0))
    for found in presets().values():
        model = Text(f"{found.title} · {found.library}\n").append(found.what, style="dim")
        shown.add_row(Text(found.name, style="bold"), model)
    return shown
