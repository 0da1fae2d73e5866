"""`kernelwright generate` and `kernelwright bench video`: LTX-Video from a prompt to an mp4."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..video.settings import PROMPT, TINY, BadSetting, CannotRun, Settings, settings

COMPARED = "eager,exact+graphs"

Model = Annotated[
    str | None,
    typer.Option(help="LTX-Video in a folder, or its Hub id. Without it: random weights."),
]
Tiny = Annotated[bool, typer.Option("--tiny", help="A small model with random weights.")]
Prompt = Annotated[str | None, typer.Option(help=f"What the video shall show. ({PROMPT})")]
NegativePrompt = Annotated[str | None, typer.Option(help="What it shall not.")]
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
    typer.Option(help=f"Denoise steps, 2 or more. ({Settings.steps}; tiny {TINY['steps']})"),
]
Guidance = Annotated[float, typer.Option(help="Weight of the prompt; 1 or less: no guidance.")]
Seed = Annotated[int, typer.Option(help="Of the noise that it begins with.")]
BatchSize = Annotated[int, typer.Option(help="Videos made at once.")]
Fps = Annotated[int, typer.Option(help="Frames a second.")]
Warmup = Annotated[int, typer.Option(help="Short runs (2 steps) before the one that counts.")]
Optimized = Annotated[
    bool | None,
    typer.Option(
        "--use-optimized-kernels/--no-optimized-kernels", help="Inject the kernels, or do not."
    ),
]
Numerics = Annotated[
    str | None, typer.Option(help="exact: the bits of eager. fused: rounds less often. (exact)")
]
Graphs = Annotated[bool, typer.Option("--graphs", help="Replay the denoiser as a CUDA graph.")]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile, by block.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu. (an idle GPU)")]
Dtype = Annotated[
    str | None, typer.Option(help="bfloat16, float16 or float32. (bfloat16; on a CPU float32)")
]
Gif = Annotated[bool, typer.Option("--gif", help="Write a gif beside the mp4.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def generate(
    prompt: Prompt = None,
    negative_prompt: NegativePrompt = None,
    output: Annotated[
        Path, typer.Option(help="The file to write: .mp4 or .gif; numbered if there are several.")
    ] = Path("video.mp4"),
    gif: Gif = False,
    model: Model = None,
    tiny: Tiny = False,
    num_frames: NumFrames = None,
    height: Height = None,
    width: Width = None,
    steps: Steps = None,
    guidance_scale: Guidance = Settings.guidance_scale,
    seed: Seed = Settings.seed,
    batch_size: BatchSize = Settings.batch,
    fps: Fps = Settings.fps,
    use_optimized_kernels: Optimized = None,
    numerics: Numerics = None,
    graphs: Graphs = False,
    compile: Compile = False,
    warmup_iterations: Warmup = 0,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Generate a video with LTX-Video, and say how long each part of it took.

    With `--model Lightricks/LTX-Video`, or a folder, it is a real video. Without, the weights are
    random: the video is noise, and the times are those of the real model. The kernels are in, and
    the frames have the bits of plain diffusers, unless options say otherwise.
    """
    with _one_line_errors("generate"):
        from ..video import compare, run, ways, write
        from ..video.progress import steps_shown

        wanted = settings(
            tiny=tiny,
            prompt=prompt,
            negative_prompt=negative_prompt,
            frames=num_frames,
            height=height,
            width=width,
            steps=steps,
            guidance_scale=guidance_scale,
            seed=seed,
            batch=batch_size,
            fps=fps,
            warmup_iterations=warmup_iterations,
        )
        way = ways.one_way(use_optimized_kernels, numerics, graphs, compile)
        files = write.video_paths(output, wanted.batch, gif=gif)
        for path in (path for paths in files for path in paths):
            write.check_output(path)
        pipe, place = _pipeline(model, tiny, device, dtype)
        with steps_shown(Console(stderr=True), quiet=as_json) as show:
            measured = run.measure(pipe, wanted, way, show)
        written = write.write_videos(files, measured.run.frames, fps)
    if as_json:
        told = {"run": str(way), **place, "settings": asdict(wanted), "files": written}
        _print_json({**told, **measured.run.times(), **measured.notes()})
        return
    console = Console()
    console.print(f"{wanted}, {place['dtype']}, {place['device']}", highlight=False)
    console.print(compare.summary(measured))
    console.print(f"Written: {', '.join(written)}", highlight=False, soft_wrap=True)


def bench_video(
    config: Annotated[
        str | None,
        typer.Option(
            help="What to compare, with commas: eager, compile, exact, exact+graphs, fused, "
            f"fused+graphs, fused+compile, ... Eager is always there. ({COMPARED})"
        ),
    ] = None,
    prompt: Prompt = None,
    negative_prompt: NegativePrompt = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Keep the videos: boat.mp4 becomes boat-eager.mp4 and so on."),
    ] = None,
    gif: Gif = False,
    model: Model = None,
    tiny: Tiny = False,
    num_frames: NumFrames = None,
    height: Height = None,
    width: Width = None,
    steps: Steps = None,
    guidance_scale: Guidance = Settings.guidance_scale,
    seed: Seed = Settings.seed,
    batch_size: BatchSize = Settings.batch,
    fps: Fps = Settings.fps,
    use_optimized_kernels: Optimized = None,
    numerics: Numerics = None,
    graphs: Graphs = False,
    compile: Compile = False,
    warmup_iterations: Warmup = 2,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this JSON file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time LTX-Video from prompt to frames: eager, torch.compile, injected, and combinations.

    Every configuration starts from the same seed, and its last latents are held against eager's;
    a second run of eager shows what differs without any kernel. A configuration that promises
    eager's bits and does not give them gets no time, and the command exits with 1. Name
    configurations with `--config`, or one to hold against eager with the options of `generate`.
    """
    with _one_line_errors("bench video"):
        from ..bench import results
        from ..video import compare, ways, write
        from ..video.progress import steps_shown

        wanted = settings(
            tiny=tiny,
            prompt=prompt,
            negative_prompt=negative_prompt,
            frames=num_frames,
            height=height,
            width=width,
            steps=steps,
            guidance_scale=guidance_scale,
            seed=seed,
            batch=batch_size,
            fps=fps,
            warmup_iterations=warmup_iterations,
        )
        named = use_optimized_kernels is not None or numerics or graphs or compile
        if named and config is not None:
            raise BadSetting("--config", "name configurations here or by options, not both")
        if named:
            compared = [ways.one_way(use_optimized_kernels, numerics, graphs, compile)]
        else:
            compared = ways.parse_ways(config or COMPARED)
        if output is not None:
            write.check_output(output)
        if out is not None:
            write.check_writable("--out", out)
        pipe, place = _pipeline(model, tiny, device, dtype)

        def keep(name: str, run: Any) -> None:
            if output is not None:
                target = output.with_stem(f"{output.stem}-{name.replace(' ', '-')}")
                write.write_videos(
                    write.video_paths(target, wanted.batch, gif=gif), run.frames, fps
                )

        with steps_shown(Console(stderr=True), quiet=as_json) as show:
            rows = compare.compare(pipe, wanted, compared, show=show, keep=keep)
        about = {**place, "model": model, "tiny": tiny, "settings": asdict(wanted)}
        if out is not None:
            results.write(out, "video", rows, **about)
    if as_json:
        _print_json({**about, "rows": rows})
    else:
        console = Console()
        console.print(compare.table(rows, f"{wanted}, {place['dtype']}, {place['device']}"))
        for remark in compare.remarks(rows):
            console.print(remark, highlight=False)
    raise typer.Exit(1 if any("failed" in row for row in rows) else 0)


@contextmanager
def _one_line_errors(command: str) -> Iterator[None]:
    import torch

    try:
        yield
    except BadSetting as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from None
    except CannotRun as error:
        typer.echo(f"kernelwright {command}: {error}", err=True)
        raise typer.Exit(1) from None
    except torch.cuda.OutOfMemoryError:
        typer.echo(f"kernelwright {command}: the GPU's memory is full: fewer frames", err=True)
        raise typer.Exit(1) from None


def _pipeline(
    model: str | None, tiny: bool, device: str | None, dtype: str | None
) -> tuple[Any, dict[str, str]]:
    """The pipeline, and where and in which dtype it is, in words."""
    import torch

    from ..video.place import choose_device, choose_dtype
    from ..video.source import pipeline

    place = choose_device(device, tiny=tiny)
    kind = choose_dtype(dtype, place)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    with Console(stderr=True).status(f"building {model or 'LTX-Video, random weights'}"):
        pipe = pipeline(model, tiny=tiny, dtype=kind, device=place)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
    return pipe, {"device": name, "dtype": str(kind).removeprefix("torch.")}


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
