"""The options that `kernelwright generate` and `kernelwright bench video` share."""

from __future__ import annotations

from typing import Annotated

import typer

from ..video.settings import PROMPT, TINY, Settings

KERNELS = "Kernels"

Model = Annotated[
    str | None,
    typer.Option(help="LTX-Video: a folder, or its id on the Hub. Without it: random weights."),
]
Tiny = Annotated[
    bool,
    typer.Option("--tiny", help="A small model with random weights, which also runs on a CPU."),
]
Prompt = Annotated[str | None, typer.Option(help="What the video shows.", show_default=PROMPT)]
NegativePrompt = Annotated[str | None, typer.Option(help="What the video should not show.")]
NumFrames = Annotated[
    int | None,
    typer.Option(
        help="Number of frames: a multiple of 8, plus 1.",
        show_default=f"{Settings.frames}; tiny {TINY['frames']}",
    ),
]
Height = Annotated[
    int | None,
    typer.Option(
        help="Pixels, a multiple of 32.", show_default=f"{Settings.height}; tiny {TINY['height']}"
    ),
]
Width = Annotated[
    int | None,
    typer.Option(
        help="Pixels, a multiple of 32.", show_default=f"{Settings.width}; tiny {TINY['width']}"
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        help="Denoising steps, 2 or more.", show_default=f"{Settings.steps}; tiny {TINY['steps']}"
    ),
]
Guidance = Annotated[float, typer.Option(help="Guidance scale; 1 or less: no guidance.")]
Seed = Annotated[int, typer.Option(help="Seed of the initial noise.")]
BatchSize = Annotated[int, typer.Option(help="Videos generated at once.")]
Fps = Annotated[int, typer.Option(help="Frames per second.")]
Warmup = Annotated[int, typer.Option(help="Short runs of 2 steps before the timed one.")]
# two flags rather than one with a negation: side by side their names leave no room for words
Optimized = Annotated[
    bool,
    typer.Option(
        "--use-optimized-kernels",
        help="Inject the kernels: the default here, and in `bench video` beside eager.",
        rich_help_panel=KERNELS,
    ),
]
Plain = Annotated[
    bool,
    typer.Option(
        "--no-optimized-kernels", help="Run plain diffusers instead.", rich_help_panel=KERNELS
    ),
]
Numerics = Annotated[
    str | None,
    typer.Option(
        help="exact: the same bits as plain diffusers. fused: rounds less often. fp8: fused, and "
        "linear layers in 8 bits.",
        show_default="exact",
        rich_help_panel=KERNELS,
    ),
]
Graphs = Annotated[
    bool,
    typer.Option(
        "--graphs",
        help="Run denoiser and text encoder as CUDA graphs (needs a GPU).",
        rich_help_panel=KERNELS,
    ),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile", help="Also torch.compile the transformer's blocks.", rich_help_panel=KERNELS
    ),
]
Gif = Annotated[bool, typer.Option("--gif", help="Write a gif beside the mp4.")]
