"""`kernelwright bench`: how fast, after how right."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .bench_loop import loop
from .bench_ops import JsonOption, OutOption, ops
from .wide import show

__all__ = ["JsonOption", "OutOption", "app"]

app = typer.Typer(
    no_args_is_help=True, help="Measure ops, models and videos; what is wrong is not timed."
)
app.command()(ops)
app.command()(loop)


@app.command()
def model(
    presets: Annotated[
        list[str] | None,
        typer.Argument(help="Presets (`kernelwright models`); all of them by default."),
    ] = None,
    config: Annotated[
        str,
        typer.Option(
            help="What to compare, with commas: eager, compile; exact, fused or fp8, each alone or "
            "with +graphs; exact or fused with +compile or +graphs+compile; with flash-attn-4 "
            "(pip install 'kernelwright[attention]') fused+fa4+graphs, fp8+fa4+graphs."
        ),
    ] = "eager,exact,exact+graphs,fused,fused+graphs,compile,exact+compile",
    frames: Annotated[int | None, typer.Option(help="Frames of a video.")] = None,
    height: Annotated[int | None, typer.Option(help="Height in pixels.")] = None,
    width: Annotated[int | None, typer.Option(help="Width in pixels.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Inputs in one batch.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a language model.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small models of the same kind.")] = False,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1 or cpu. An idle GPU if there is one.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16 or float32. bfloat16 by default, float32 on a CPU."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time spent on each.")] = 2.0,
    error: Annotated[
        bool, typer.Option("--error/--no-error", help="Hold results against a float32 run.")
    ] = True,
    first: Annotated[
        str,
        typer.Option(
            help="Also time the first result of these configurations, with commas, in new "
            "processes with cold and with warm caches, and the first at another size."
        ),
    ] = "",
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time one forward of whole models: eager, torch.compile, injected, and combinations.

    A time is taken only after the result was held against eager: exact must give its bits, fused
    an error against a float32 run that is not above eager's. Exits with 1 if one does not. A
    configuration that cannot be had here gets a line that says why. On a GPU the time is split
    into GEMM, attention, fused kernels and the rest.
    """
    from ..bench import models as bench
    from ..bench.models_table import notes, table
    from ..errors import BadSetting, CannotRun

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
            first_of=first.split(",") if first else (),
            out=out,
        )
    except CannotRun as no:
        typer.echo(f"kernelwright bench model: {no}", err=True)
        raise typer.Exit(1) from None
    except BadSetting as wrong:
        raise typer.BadParameter(str(wrong), param_hint=wrong.option) from None
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
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
