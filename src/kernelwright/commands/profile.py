"""`kernelwright profile`: which kernels take the time of a forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import shared_options as option
from .command_line import split
from .one_line_errors import one_line_errors


def profile(
    preset: Annotated[
        str, typer.Argument(metavar="PRESET", help="A model that `kernelwright models` lists.")
    ],
    level: Annotated[
        str,
        typer.Option(help="1: torch.profiler, 2: nsys, 3: ncu. Several are comma-separated."),
    ] = "1",
    config: Annotated[
        str | None,
        typer.Option(
            help="What to profile, comma-separated: eager, exact, fused, fp8, compile, "
            "exact+graphs, ... (those of `bench model`). By default eager and exact; at "
            "level 3 exact.",
        ),
    ] = None,
    frames: option.Frames = None,
    height: option.Height = None,
    width: option.Width = None,
    batch_size: option.BatchSize = None,
    tokens: option.Tokens = None,
    tiny: option.Tiny = False,
    device: option.Device = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            help="Level 3: a regular expression for names of kernels. By default, kernelwright's."
        ),
    ] = None,
    launches: Annotated[
        int, typer.Option(help="Level 3: profile at most this many launches.", min=1)
    ] = 50,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Level 1: write a trace for chrome://tracing, one for each configuration."
        ),
    ] = None,
    out: option.OutOption = None,
    as_json: option.JsonOption = False,
) -> None:
    """Show which kernels take the time of one forward of a preset.

    Level 1 ranks kernels and groups them (GEMM, attention, norm, modulation, RoPE, activation,
    copies), and counts the graph breaks of `--config compile`. Level 2 does the same with nsys.
    Level 3 profiles single kernels with ncu: bandwidth, occupancy, what limits it, and one line of
    advice. Exits with 1 if the tool of a level is missing; the other levels still run.
    """
    from ..profiling.kernel_tables import page
    from ..profiling.run import run
    from ..progress import steps_shown

    sizes = {"frames": frames, "height": height, "width": width, "batch": batch_size}
    sizes["tokens"] = tokens
    with (
        one_line_errors("profile", ValueError),
        steps_shown(Console(stderr=True), quiet=as_json) as show,
    ):
        rows, problems = run(
            preset,
            _levels(level),
            split(config) if config else (),
            sizes={name: size for name, size in sizes.items() if size is not None},
            tiny=tiny,
            device=device,
            kernels=kernels,
            launches=launches,
            trace=trace,
            out=out,
            show=show,
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    elif rows:
        Console().print(page(rows))
    for problem in problems:
        typer.echo(f"kernelwright profile: {problem}", err=True)
    raise typer.Exit(1 if problems else 0)


def _levels(text: str) -> list[int]:
    levels = text.split(",")
    if not all(level.isdigit() for level in levels):
        raise ValueError(f"--level is {text!r}, expected 1, 2, 3, or several with commas")
    return [int(level) for level in levels]
