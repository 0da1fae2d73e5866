"""`kernelwright bench ops`: one kernel at a time, compared with its peers."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from . import shared_options as option
from .command_line import split
from .one_line_errors import one_line_errors
from .wide_tables import show


def ops(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="OP", help="Ops that `kernelwright ops` lists; all by default."),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(help="Shapes of a model: seed, ltx, flux, wan, llama, ...; may be repeated."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Rows and width, such as 2x1024x2048; may be repeated."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float16, float32, comma-separated. By default bfloat16; on a CPU "
            "float32."
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Whom to compare with: torch, compile, liger, quack, comma-separated. By default "
            "all; on a CPU torch."
        ),
    ] = None,
    device: option.DeviceOrCpu = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds spent on timing each backend and peer.")
    ] = 0.1,
    out: option.OutOption = None,
    as_json: option.JsonOption = False,
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
            dtypes=split(dtype) if dtype else (),
            peers=split(peers) if peers else None,
            device=device,
            seconds=seconds,
            out=out,
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        wanted = split(peers) if peers else bench.default_peers(rows[0]["device"])
        show(table(rows, [PEERS[name].column for name in wanted]), notes(rows))
    for line in missing:
        typer.echo(f"kernelwright bench ops: {line}", err=True)
    raise typer.Exit(1 if bench.failures(rows) else 0)
