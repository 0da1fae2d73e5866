"""`kernelwright bench ops`: one kernel at a time, compared with its peers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .one_line_errors import one_line_errors
from .wide_tables import show

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
        typer.Option(help="Rows and width, such as 2x1024x2048; may be repeated."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float16, float32, comma-separated. (bfloat16; on a CPU float32)"
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="torch, compile, liger, quack, comma-separated. By default all, on a CPU torch."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1 or cpu. By default an idle GPU.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Time for each backend and peer of a case.")
    ] = 0.1,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time ops at the shapes of models: our kernels, PyTorch, torch.compile, Liger, QuACK.

    A time is taken only after the result was compared with float64: the error may not be above
    eager's by more than a rounding, exact modes must give the bits of their chain. GB/s is compared
    with a copy of as many bytes in the same run. Without a preset or a shape: every shape of every
    model, or on a CPU one small shape of each op. Exits with 1 if a kernel is wrong, or if PyTorch
    ran instead.

    `kernelwright bench ops rmsnorm --preset seed` has the five shapes of the example's RMSNorm.
    """
    from ..bench import ops as bench
    from ..bench.ops_table import notes, table
    from ..bench.peers import PEERS

    with one_line_errors("bench ops"):
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
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        wanted = peers.split(",") if peers else bench.default_peers(rows[0]["device"])
        show(table(rows, [PEERS[name].column for name in wanted]), notes(rows))
    for line in missing:
        typer.echo(f"kernelwright bench ops: {line}", err=True)
    raise typer.Exit(1 if bench.failures(rows) else 0)
