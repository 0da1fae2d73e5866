"""`kernelwright bench`: how fast, after how right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True, help="Measure models and videos; what is wrong is not timed."
)
DTYPES = ("bfloat16", "float16", "float32")

OutOption = Annotated[Path | None, typer.Option(help="Write the rows to this JSON file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command()
def model(
    presets: Annotated[
        list[str] | None,
        typer.Argument(help="Presets (`kernelwright models`); all of them by default."),
    ] = None,
    config: Annotated[
        str,
        typer.Option(
            help="What to compare, with commas: eager, compile, exact, exact+graphs, fused, "
            "fused+graphs, exact+compile, fused+compile."
        ),
    ] = "eager,exact,exact+graphs,fused,fused+graphs,compile,exact+compile",
    frames: Annotated[int | None, typer.Option(help="Frames of a video.")] = None,
    height: Annotated[int | None, typer.Option(help="Height in pixels.")] = None,
    width: Annotated[int | None, typer.Option(help="Width in pixels.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Inputs in one batch.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a language model.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small models of the same kind.")] = False,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    seconds: Annotated[float, typer.Option(help="Time spent on each.")] = 2.0,
    error: Annotated[
        bool, typer.Option("--error/--no-error", help="Hold results against a float32 run.")
    ] = True,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time one forward of whole models: eager, torch.compile, injected, and combinations.

    A time is taken only after the result was held against eager: exact must give its bits, fused
    an error against a float32 run that is not above eager's. Exits with 1 if one does not.
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r}, expected any of {', '.join(DTYPES)}")
    from ..bench import models as bench

    sizes = {"frames": frames, "height": height, "width": width, "batch": batch_size}
    sizes["tokens"] = tokens
    try:
        rows = bench.run(
            presets or [],
            config.split(","),
            {name: size for name, size in sizes.items() if size is not None},
            tiny=tiny,
            device=device,
            dtype=dtype,
            seconds=seconds,
            with_error=error,
            out=out,
        )
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        Console().print(bench.table(rows))
    raise typer.Exit(1 if any("failed" in row for row in rows) else 0)
