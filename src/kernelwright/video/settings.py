"""Settings of a generation: sizes, steps, prompt and seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import BadSetting

PROMPT = "a red fishing boat on a quiet lake at dawn, mist over the water"
NEGATIVE_PROMPT = "worst quality, inconsistent motion, blurry, jittery, distorted"

# compression of the autoencoder: eight frames to one after the first, 32 pixels to one
FRAME_STRIDE = 8
PIXEL_STRIDE = 32
# the scheduler stretches its sigmas over the steps between the first and the last
MIN_STEPS = 2
# the name of the second run of eager: it shows what differs without any kernel
CONTROL = "eager again"
# sizes for a tiny model: seconds on a CPU
TINY = {"frames": 9, "height": 64, "width": 96, "steps": 4}


@dataclass(frozen=True)
class Settings:
    """One generation. Raises a `BadSetting` for sizes that LTX-Video does not support.

    >>> Settings(frames=50)
    Traceback (most recent call last):
    kernelwright.errors.BadSetting: 50 frames, expected 8k + 1: 49 or 57
    """

    prompt: str = PROMPT
    negative_prompt: str = NEGATIVE_PROMPT
    frames: int = 161
    height: int = 512
    width: int = 768
    steps: int = 50
    guidance_scale: float = 3.0
    seed: int = 42
    batch: int = 1
    fps: int = 25
    warmup_iterations: int = 0

    def __post_init__(self) -> None:
        if self.frames < 1 or self.frames % FRAME_STRIDE != 1:
            below, above = _around(self.frames - 1, FRAME_STRIDE, 0)
            raise BadSetting(
                "--num-frames",
                f"{self.frames} frames, expected {FRAME_STRIDE}k + 1: {_or(below + 1, above + 1)}",
            )
        for option, pixels in (("--height", self.height), ("--width", self.width)):
            if pixels < PIXEL_STRIDE or pixels % PIXEL_STRIDE:
                near = _or(*_around(pixels, PIXEL_STRIDE, PIXEL_STRIDE))
                raise BadSetting(
                    option, f"{pixels} pixels, expected a multiple of {PIXEL_STRIDE}: {near}"
                )
        if not self.prompt.strip():
            raise BadSetting("--prompt", "empty, expected what the video shows")
        least = {
            "--steps": (self.steps, MIN_STEPS),
            "--batch-size": (self.batch, 1),
            "--fps": (self.fps, 1),
            "--warmup-iterations": (self.warmup_iterations, 0),
            "--seed": (self.seed, 0),
        }
        for option, (value, low) in least.items():
            if value < low:
                raise BadSetting(option, f"{value}, expected {low} or more")

    def __str__(self) -> str:
        videos = f"{self.batch} videos of " if self.batch > 1 else ""
        return (
            f"{videos}{self.frames} frames of {self.width} × {self.height}, "
            f"{self.steps} steps, guidance {self.guidance_scale:g}, seed {self.seed}"
        )


def settings(*, tiny: bool, **given: Any) -> Settings:
    """Settings from the given values; the default for None."""
    named = {name: value for name, value in given.items() if value is not None}
    return Settings(**{**(TINY if tiny else {}), **named})


def _around(value: int, stride: int, least: int) -> tuple[int, int]:
    """The multiples of `stride` on both sides of a value, none below `least`."""
    below = max(least, value // stride * stride)
    return below, max(least, below + stride if below < value else below)


def _or(a: int, b: int) -> str:
    return str(a) if a == b else f"{a} or {b}"
