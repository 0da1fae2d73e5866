"""`kernelwright bench`: times of what was first checked to be correct."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .bench_generate import generate
from .bench_loop import loop
from .bench_ops import JsonOption, OutOption, ops
from .bench_train import train
from .one_line_errors import one_line_errors
from .wide_tables import show

OF_ONE = "eager,exact,exact+graphs,fused,fused+graphs,compile,exact+compile"
OF_ALL = "eager,compile,compile+graphs,exact+graphs,fused+graphs,fp8+graphs"

__all__ = ["JsonOption", "OutOption", "app"]

app = typer.Typer(
    no_args_is_help=True,
    help="Measure ops, models, training, loops and generation; a wrong result is not timed.",
)
app.command()(ops)
app.command()(loop)
app.command()(generate)
app.command()(train)


@app.command()
def model(
    presets: Annotated[
        list[str] | None,
        typer.Argument(help="Presets (`kernelwright models`); all of them by default."),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help=f"All presets in one table; configurations {OF_ALL} if not given."
        ),
    ] = False,
    layers: Annotated[
        int | None,
        typer.Option(help="Build at most so many layers of each kind of block, at full width."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Start nothing after so many minutes; what is left out is listed."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            show_default=OF_ONE,
            help="What to compare, comma-separated: eager; compile, exact, fused or fp8, alone or "
            "with +graphs; compile with +strict, +strict_pointwise or +strict_reduction; exact or "
            "fused with +compile or +graphs+compile; with flash-attn-4 "
            "(pip install 'kernelwright[attention]') fused+fa4+graphs, fp8+fa4+graphs.",
        ),
    ] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a video.")] = None,
    height: Annotated[int | None, typer.Option(help="Height in pixels.")] = None,
    width: Annotated[int | None, typer.Option(help="Width in pixels.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Inputs in one batch.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a language model.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small models of the same kind.")] = False,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1 or cpu. By default an idle GPU.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16 or float32. By default bfloat16, on a CPU float32."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time spent on each configuration.")] = 2.0,
    error: Annotated[
        bool, typer.Option("--error/--no-error", help="Compare results with a float32 run.")
    ] = True,
    first: Annotated[
        str,
        typer.Option(
            help="Also time the first result of these configurations, comma-separated, in new "
            "processes with cold and with warm caches, and the first at another size."
        ),
    ] = "",
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time one forward of whole models: eager, torch.compile, injected, and combinations.

    A time is taken only after the result was compared with eager: exact must give its bits, fused
    an error against a float32 run that is not above eager's. Exits with 1 if one does not. A model
    or a configuration that fails or is not available here gets a line that says why, and the others
    still run. On a GPU the time is split into GEMM, attention, fused kernels and the rest.
    """
    from ..bench import models as bench
    from ..bench.models_table import notes, table

    sizes = {"frames": frames, "height": height, "width": width, "batch": batch_size}
    sizes["tokens"] = tokens
    if everything and presets:
        raise typer.BadParameter("it takes all presets: leave their names out", param_hint="--all")
    with one_line_errors("bench model", ValueError):
        rows = bench.run(
            presets or [],
            (config or (OF_ALL if everything else OF_ONE)).split(","),
            {name: size for name, size in sizes.items() if size is not None},
            tiny=tiny,
            device=device,
            dtype=dtype,
            seconds=seconds,
            with_error=error,
            first_of=first.split(",") if first else (),
            out=out,
            layers=layers,
            minutes=minutes,
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        show(table(rows), notes(rows))
    for row in rows:
        if "first_problem" in row:
            name = f"{row['model']} {row['config']}"
            typer.echo(f"kernelwright bench model: {name}: {row['first_problem']}", err=True)
    failed = any("failed" in row and "unavailable" not in row for row in rows)
    raise typer.Exit(1 if failed or not any("ms" in row for row in rows) else 0)
