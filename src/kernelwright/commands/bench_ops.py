"""`kernelwright bench ops`: one kernel at a time, beside its peers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .wide import show

OutOption = Annotated[Path | None, typer.Option(help="Write the rows to this JSON file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def ops(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="OP", help="Ops (`kernelwright ops`); all of them by default."),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(help="The shapes of seed, ltx, flux, wan, llama, ...; may be repeated."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Rows and width, as 2x1024x2048; may be repeated."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float16, float32, with commas. bfloat16 by default, float32 on a CPU."
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="torch, compile, liger, quack, with commas. All by default, torch on a CPU."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1 or cpu. An idle GPU if there is one.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Time for each way of a case.")] = 0.1,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time ops at the shapes of models: our kernels beside PyTorch, torch.compile, Liger, QuACK.

    A time is taken only after the answer was held against float64: the error may not be above
    eager's by more than a rounding, exact modes must give the bits of their chain. GB/s is held
    against a copy of as many bytes in the same run. Without a preset or a shape: every shape of
    every model, or on a CPU one small shape of each op. Exits with 1 if a kernel is wrong, or if
    PyTorch ran in its place.

    `kernelwright bench ops rmsnorm --preset seed` has the five shapes of the example's RMSNorm.
    """
    from ..bench import ops as bench
    from ..bench.ops_table import notes, table
    from ..bench.peers import PEERS
    from ..errors import BadSetting, CannotRun

    try:
        rows, missing = bench.run(
            names or (),
            presets=preset or (),
            shapes=shape or (),
            dtypes=dtype.split(",") if dtype else (),
            peers=peers.split(",") if peers else None,
            device=device,
            seconds=seconds,
            out=out,
        )
    except BadSetting as wrong:
        raise typer.BadParameter(str(wrong), param_hint=wrong.option) from None
    except CannotRun as no:
        typer.echo(f"kernelwright bench ops: {no}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        wanted = peers.split(",") if peers else bench.default_peers(rows[0]["device"])
        show(table(rows, [PEERS[name].column for name in wanted]), notes(rows))
    for line in missing:
        typer.echo(f"kernelwright bench ops: {line}", err=True)
    raise typer.Exit(1 if bench.failures(rows) else 0)
