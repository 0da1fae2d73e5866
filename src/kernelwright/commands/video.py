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

from ..errors import BadSetting, CannotRun
from ..measure.cpu_caveat import CAVEAT
from ..video.settings import Settings, settings
from . import video_options as option
from .command_line import spaced
from .shared_options import Device, Dtype, JsonOption, OutOption

COMPARED = "eager,exact+graphs"


def generate(
    prompt: option.Prompt = None,
    negative_prompt: option.NegativePrompt = None,
    output: Annotated[
        Path, typer.Option(help="The file to write: .mp4 or .gif; numbered if there are several.")
    ] = Path("video.mp4"),
    gif: option.Gif = False,
    model: option.Model = None,
    tiny: option.Tiny = False,
    num_frames: option.NumFrames = None,
    height: option.Height = None,
    width: option.Width = None,
    steps: option.Steps = None,
    guidance_scale: option.Guidance = Settings.guidance_scale,
    seed: option.Seed = Settings.seed,
    batch_size: option.BatchSize = Settings.batch,
    fps: option.Fps = Settings.fps,
    use_optimized_kernels: option.Optimized = False,
    no_optimized_kernels: option.Plain = False,
    numerics: option.Numerics = None,
    graphs: option.Graphs = False,
    compile: option.Compile = False,
    warmup_iterations: option.Warmup = 0,
    device: Device = None,
    dtype: Dtype = None,
    as_json: JsonOption = False,
) -> None:
    """Generate a video with LTX-Video, and show how long each part took.

    With `--model Lightricks/LTX-Video`, or a folder, it is a real video. Without, the weights are
    random: the video is noise, and the times are those of the real model. By default the kernels
    are injected as `exact`: the frames have the same bits as with plain diffusers.
    """
    with _one_line_errors("generate"):
        from ..progress import steps_shown
        from ..video import compare, run, ways, write

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
        optimized = _optimized(use_optimized_kernels, no_optimized_kernels)
        way = ways.one_way(optimized, numerics, graphs, compile)
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
    _print_caveat(console, place)
    console.print(f"Written: {', '.join(written)}", highlight=False, soft_wrap=True)


def bench_video(
    config: Annotated[
        str | None,
        typer.Option(
            show_default=spaced(COMPARED),
            help="What to compare, comma-separated: eager, compile; exact, fused or fp8, alone or "
            "with +graphs, +compile or both. Eager always runs.",
        ),
    ] = None,
    prompt: option.Prompt = None,
    negative_prompt: option.NegativePrompt = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Keep the videos: boat.mp4 becomes boat-eager.mp4 and so on."),
    ] = None,
    gif: option.Gif = False,
    model: option.Model = None,
    tiny: option.Tiny = False,
    num_frames: option.NumFrames = None,
    height: option.Height = None,
    width: option.Width = None,
    steps: option.Steps = None,
    guidance_scale: option.Guidance = Settings.guidance_scale,
    seed: option.Seed = Settings.seed,
    batch_size: option.BatchSize = Settings.batch,
    fps: option.Fps = Settings.fps,
    use_optimized_kernels: option.Optimized = False,
    no_optimized_kernels: option.Plain = False,
    numerics: option.Numerics = None,
    graphs: option.Graphs = False,
    compile: option.Compile = False,
    warmup_iterations: option.Warmup = 2,
    device: Device = None,
    dtype: Dtype = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time LTX-Video from prompt to frames: eager, torch.compile, injected, and combinations.

    Eager is plain diffusers. Every configuration starts from the same seed, and its last latents
    are compared with eager's; a second run of eager shows what differs without any kernel. A
    configuration that promises eager's bits and does not give them gets no time, and the command
    exits with 1. Name configurations with `--config`, or one with the options of `generate`.
    """
    with _one_line_errors("bench video"):
        from ..measure import results
        from ..measure.results import environment_of
        from ..progress import steps_shown
        from ..video import compare, ways, write

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
        optimized = _optimized(use_optimized_kernels, no_optimized_kernels)
        named = optimized is not None or numerics or graphs or compile
        if named and config is not None:
            raise BadSetting("--config", "name configurations here or by options, not both")
        if named:
            compared = [ways.one_way(optimized, numerics, graphs, compile)]
        else:
            compared = ways.parse_ways(config or COMPARED)
        if output is not None:
            write.check_output(output)
        if out is not None:
            results.check_writable(out)
        pipe, place = _pipeline(model, tiny, device, dtype)

        def keep(name: str, run: Any) -> None:
            if output is not None:
                target = output.with_stem(f"{output.stem}-{name.replace(' ', '-')}")
                write.write_videos(
                    write.video_paths(target, wanted.batch, gif=gif), run.frames, fps
                )

        with steps_shown(Console(stderr=True), quiet=as_json) as show:
            rows = compare.compare(pipe, wanted, compared, show=show, keep=keep)
        name = None if model is None else results.portable(model)
        about = {**place, "model": name, "tiny": tiny, "settings": asdict(wanted)}
        if out is not None:
            where = environment_of(pipe.transformer.device)
            results.write(out, "video", rows, environment=where, **about)
    if as_json:
        _print_json({**about, "rows": rows})
    else:
        console = Console()
        console.print(compare.table(rows, f"{wanted}, {place['dtype']}, {place['device']}"))
        for remark in compare.remarks(rows):
            console.print(remark, highlight=False)
        _print_caveat(console, place)
    raise typer.Exit(1 if any("failed" in row for row in rows) else 0)


def _optimized(use: bool, plain: bool) -> bool | None:
    """What two flags ask for; None for neither."""
    if use and plain:
        raise BadSetting("--no-optimized-kernels", "not together with --use-optimized-kernels")
    return use or (False if plain else None)


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
        typer.echo(f"kernelwright {command}: the GPU is out of memory: use fewer frames", err=True)
        raise typer.Exit(1) from None


def _pipeline(
    model: str | None, tiny: bool, device: str | None, dtype: str | None
) -> tuple[Any, dict[str, str]]:
    """The pipeline, and the names of its device and dtype."""
    import torch

    from ..place import choose_device, choose_dtype
    from ..video.source import pipeline

    place = choose_device(device, tiny=tiny)
    kind = choose_dtype(dtype, place)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    with Console(stderr=True).status(f"building {model or 'LTX-Video, random weights'}"):
        pipe = pipeline(model, tiny=tiny, dtype=kind, device=place)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
    return pipe, {"device": name, "dtype": str(kind).removeprefix("torch.")}


def _print_caveat(console: Console, place: dict[str, str]) -> None:
    if place["device"] == "CPU":
        console.print(CAVEAT, style="yellow")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
