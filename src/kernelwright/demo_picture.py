"""The picture of `kernelwright demo --save`: frames before and after, and their difference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import BadSetting

WIDTH = 1000  # small frames are enlarged to about this
MARGIN, LABEL = 12, 24
PAPER, INK = (251, 250, 248), (29, 28, 26)


def check_name(path: Path) -> None:
    """Raise BadSetting if no picture can be written under this name."""
    from PIL import Image

    Image.init()
    if path.suffix.lower() not in Image.EXTENSION:
        raise BadSetting("--save", f"{path.name!r}, expected a name that ends in .png or .jpg")


def save(path: Path, before: Tensor, after: Mapping[str, Tensor]) -> None:
    """Write a picture: a labelled row of frames for eager, and for each way its frames and their
    difference from eager's. Frames are [frames, channels, height, width] in 0..1."""
    from PIL import Image, ImageDraw

    rows = [("before: eager, without kernels", before)]
    for name, frames in after.items():
        label, difference = compared(before, frames)
        rows += [(f"after: {name}", frames), (f"difference of {name}: {label}", difference)]
    strips = [(label, _strip(frames)) for label, frames in rows]
    width = 2 * MARGIN + strips[0][1].width
    height = MARGIN + sum(LABEL + strip.height + MARGIN for _, strip in strips)
    picture = Image.new("RGB", (width, height), PAPER)
    draw, y = ImageDraw.Draw(picture), MARGIN
    for label, strip in strips:
        draw.text((MARGIN, y), label, fill=INK, font_size=15)
        picture.paste(strip, (MARGIN, y + LABEL))
        y += LABEL + strip.height + MARGIN
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


def compared(before: Tensor, after: Tensor) -> tuple[str, Tensor]:
    """The difference in words and as frames, brightened so that its largest value is white."""
    difference = (before.double() - after.double()).abs()
    largest = float(difference.max())
    if torch.equal(before, after):
        return "none, every bit is the same", difference
    return (
        f"at most {largest:.2g} of 1, shown {1 / largest:.0f} times brighter",
        difference / largest,
    )


def _strip(frames: Tensor) -> Any:
    """Every other frame, side by side."""
    from PIL import Image

    row = torch.cat(list(frames[::2].cpu().float()), dim=2)
    pixels = (row.clamp(0, 1) * 255).byte().permute(1, 2, 0).contiguous()
    strip = Image.fromarray(pixels.numpy())
    times = max(1, round(WIDTH / strip.width))
    return strip.resize((strip.width * times, strip.height * times), Image.Resampling.NEAREST)
