"""`kernelwright bench loop`: denoising loops, with and without First Block Cache."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from . import shared_options as option
from .command_line import spaced, split
from .one_line_errors import one_line_errors
from .wide_tables import show

DEFAULT = "eager,cache,exact,exact+graphs,exact+cache,exact+graphs+cache"


def loop(
    presets: Annotated[
        list[str] | None,
        typer.Argument(metavar="PRESET", help="ltx-video or flux-dev; both by default."),
    ] = None,
    config: Annotated[
        str,
        typer.Option(
            show_default=spaced(DEFAULT),
            help="What to compare, comma-separated: eager, exact or exact+graphs, alone or with "
            "+cache (cache instead of eager+cache).",
        ),
    ] = DEFAULT,
    steps: Annotated[int, typer.Option(min=2, help="Denoising steps.")] = 30,
    threshold: Annotated[
        float,
        typer.Option(
            min=0.0, help="First Block Cache skips a step whose first block changes less."
        ),
    ] = 0.1,
    tiny: option.Tiny = False,
    device: option.Device = None,
    dtype: option.Dtype = None,
    seconds: option.Seconds = 2.0,
    out: option.OutOption = None,
    as_json: option.JsonOption = False,
) -> None:
    """Time denoising loops with and without diffusers' First Block Cache, injected and not.

    A time is taken only after the latents were compared with the same loop without injection:
    exact must give its bits, with the cache those of the cache alone. Exits with 1 if it does not.
    """
    from ..bench import loops
    from ..bench.models_table import notes, table

    with one_line_errors("bench loop", ValueError):
        rows = loops.run(
            presets or [],
            split(config),
            steps=steps,
            threshold=threshold,
            tiny=tiny,
            device=device,
            dtype=dtype,
            seconds=seconds,
            out=out,
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        show(table(rows, f"{steps} steps"), notes(rows))
    raise typer.Exit(1 if any("failed" in row for row in rows) else 0)
