"""`kernelwright bench`: times of what was first checked to be correct."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from . import shared_options as option
from .bench_generate import generate
from .bench_loop import loop
from .bench_ops import ops
from .bench_train import train
from .command_line import CommandLine, Group, spaced, split
from .one_line_errors import one_line_errors
from .shared_options import JsonOption, OutOption
from .wide_tables import show

OF_ONE = "eager,compile,compile+graphs,exact,exact+graphs,fused,fused+graphs,exact+compile"
PEERS = {"torchao": ("torchao+compile", "torchao+compile+graphs")}
OF_PEER = "eager,compile,compile+graphs,fp8,fp8+graphs"
OF_ALL = "eager,compile,compile+graphs,exact+graphs,fused+graphs,fp8+graphs"

__all__ = ["JsonOption", "OutOption", "app"]


class _Bench(Group):
    order = ("model", "video", "loop", "generate", "train", "ops")


app = CommandLine(
    cls=_Bench,
    help="Measure models, videos, training, text generation and single ops. Every result is first "
    "compared with eager, which is the model without our kernels; a wrong one gets no time.",
)
app.command()(ops)
app.command()(loop)
app.command()(generate)
app.command()(train)


@app.command()
def model(
    presets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PRESET",
            help="Models that `kernelwright models` lists; all of them by default.",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help=f"All presets in one table; without --config: {spaced(OF_ALL)}."
        ),
    ] = False,
    layers: option.Layers = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Start nothing new after this many minutes; what is left out is listed."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            show_default=spaced(OF_ONE),
            help="What to compare, comma-separated: eager; compile, exact, fused or fp8, alone or "
            "with +graphs (CUDA graphs); exact, fused or fp8 with +programs (recipes=False) or "
            "+programs+graphs; compile with +autotune or +autotune+graphs (the mode "
            "max-autotune), +strict, +strict_pointwise or +strict_reduction (numerics of torch "
            "2.15); exact or fused with +compile or +graphs+compile, fp8+compile; with "
            "flash-attn-4 (pip install 'kernelwright[attention]') fused+fa4+graphs, "
            "fp8+fa4+graphs.",
        ),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            help="A library to compare fp8 with in the same run: torchao, its dynamic float8 by "
            f"row with torch.compile. Without --config: {spaced(OF_PEER)}. Also denoises in 30 "
            "steps, and shows the PSNR of the last latents against eager's."
        ),
    ] = None,
    frames: option.Frames = None,
    height: option.Height = None,
    width: option.Width = None,
    batch_size: option.BatchSize = None,
    tokens: option.Tokens = None,
    tiny: option.Tiny = False,
    device: option.Device = None,
    dtype: option.Dtype = None,
    seconds: option.Seconds = 2.0,
    error: Annotated[
        bool,
        typer.Option("--error/--no-error", help="Whether to compare results with a float32 run."),
    ] = True,
    first: Annotated[
        str,
        typer.Option(
            help="Also time the first result of these configurations, comma-separated, in new "
            "processes with cold and with warm caches, and the first at another size."
        ),
    ] = "",
    out: option.OutOption = None,
    as_json: option.JsonOption = False,
) -> None:
    """Time one forward of whole models: eager, torch.compile, injected, and combinations.

    Eager is the model without our kernels. A time is taken only after the result was compared with
    eager's: exact must give the same bits, fused an error against a float32 run that is not above
    eager's; of fp8 the error is shown. Exits with 1 if one breaks its promise. A model
    or a configuration that fails or is not available here gets a line that says why, and the others
    still run. On a GPU the time is split into GEMM, attention, fused kernels and the rest.
    """
    from ..bench import models as bench
    from ..bench.models_table import notes, table

    sizes = {"frames": frames, "height": height, "width": width, "batch": batch_size}
    sizes["tokens"] = tokens
    if everything and presets:
        raise typer.BadParameter("it takes all presets: leave their names out", param_hint="--all")
    if peer is not None and peer not in PEERS:
        raise typer.BadParameter(
            f"{peer!r}, expected one of {', '.join(PEERS)}", param_hint="--peer"
        )
    usual = OF_PEER if peer else OF_ALL if everything else OF_ONE
    with one_line_errors("bench model", ValueError):
        rows = bench.run(
            presets or [],
            [*split(usual if config is None else config), *PEERS.get(peer or "", ())],
            {name: size for name, size in sizes.items() if size is not None},
            tiny=tiny,
            device=device,
            dtype=dtype,
            seconds=seconds,
            with_error=error,
            first_of=split(first) if first else (),
            out=out,
            layers=layers,
            minutes=minutes,
            with_latents=peer is not None,
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
