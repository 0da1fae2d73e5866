"""`kernelwright bench loop`: denoising loops, with a cache and without."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .bench_ops import JsonOption, OutOption
from .wide import show


def loop(
    presets: Annotated[
        list[str] | None, typer.Argument(help="ltx-video, flux-dev; both by default.")
    ] = None,
    config: Annotated[
        str,
        typer.Option(
            help="What to compare, with commas: eager, exact or exact+graphs, each alone or with "
            "+cache (cache instead of eager+cache)."
        ),
    ] = "eager,cache,exact,exact+graphs,exact+cache,exact+graphs+cache",
    steps: Annotated[int, typer.Option(min=2, help="Steps of the loop.")] = 30,
    threshold: Annotated[
        float, typer.Option(min=0.0, help="The change of the first block that is still skipped.")
    ] = 0.1,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small models of the same kind.")] = False,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1 or cpu. An idle GPU if there is one.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16 or float32. bfloat16 by default, float32 on a CPU."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time spent on each.")] = 2.0,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time denoising loops with diffusers' First Block Cache, injected and not.

    A time is taken only after the latents were held against the same loop without injection:
    exact must give its bits, with the cache those of the cache alone. Exits with 1 if it does not.
    """
    from ..bench import loops
    from ..bench.models_table import notes, table
    from ..errors import BadSetting, CannotRun

    try:
        rows = loops.run(
            presets or [],
            config.split(","),
            steps=steps,
            threshold=threshold,
            tiny=tiny,
            device=device,
            dtype=dtype,
            seconds=seconds,
            out=out,
        )
    except CannotRun as no:
        typer.echo(f"kernelwright bench loop: {no}", err=True)
        raise typer.Exit(1) from None
    except BadSetting as wrong:
        raise typer.BadParameter(str(wrong), param_hint=wrong.option) from None
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        show(table(rows, f"{steps} steps"), notes(rows))
    raise typer.Exit(1 if any("failed" in row for row in rows) else 0)
