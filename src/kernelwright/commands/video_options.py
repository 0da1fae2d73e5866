"""The options that `kernelwright generate` and `kernelwright bench video` share."""

from __future__ import annotations

from typing import Annotated

import typer

from ..video.settings import PROMPT, TINY, Settings

Model = Annotated[
    str | None,
    typer.Option(help="LTX-Video in a folder, or its Hub id. Without it: random weights."),
]
Tiny = Annotated[bool, typer.Option("--tiny", help="A small model with random weights.")]
Prompt = Annotated[str | None, typer.Option(help=f"What the video shows. ({PROMPT})")]
NegativePrompt = Annotated[str | None, typer.Option(help="What the video should not show.")]
NumFrames = Annotated[
    int | None, typer.Option(help=f"Frames, 8k + 1. ({Settings.frames}; tiny {TINY['frames']})")
]
Height = Annotated[
    int | None,
    typer.Option(help=f"Pixels, a multiple of 32. ({Settings.height}; tiny {TINY['height']})"),
]
Width = Annotated[
    int | None,
    typer.Option(help=f"Pixels, a multiple of 32. ({Settings.width}; tiny {TINY['width']})"),
]
Steps = Annotated[
    int | None,
    typer.Option(help=f"Denoising steps, 2 or more. ({Settings.steps}; tiny {TINY['steps']})"),
]
Guidance = Annotated[float, typer.Option(help="Guidance scale; 1 or less: no guidance.")]
Seed = Annotated[int, typer.Option(help="Seed of the initial noise.")]
BatchSize = Annotated[int, typer.Option(help="Videos generated at once.")]
Fps = Annotated[int, typer.Option(help="Frames per second.")]
Warmup = Annotated[int, typer.Option(help="Short runs (2 steps) before the timed one.")]
Optimized = Annotated[
    bool | None,
    typer.Option(
        "--use-optimized-kernels/--no-optimized-kernels", help="Inject the kernels or not."
    ),
]
Numerics = Annotated[
    str | None,
    typer.Option(
        help="exact: the bits of eager. fused: rounds less often. fp8: fp8 GEMMs. (exact)"
    ),
]
Graphs = Annotated[
    bool, typer.Option("--graphs", help="Replay denoiser and text encoder as CUDA graphs.")
]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile, by block.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu. (an idle GPU)")]
Dtype = Annotated[
    str | None, typer.Option(help="bfloat16, float16 or float32. (bfloat16; on a CPU float32)")
]
Gif = Annotated[bool, typer.Option("--gif", help="Write a gif beside the mp4.")]
