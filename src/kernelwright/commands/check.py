"""`kernelwright check`: whether one op is good."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from .bench import JsonOption


def check(
    name: Annotated[str, typer.Argument(help="The op (`kernelwright ops`).")],
    only: Annotated[
        str | None, typer.Option(help="Some parts, with commas: tests, cubins, gpu, benchmark.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Cubins for these, with commas: sm_75, sm_80, sm_89, sm_90, ... All."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run everything that belongs to one op: tests, cubins, GPU tests, benchmark, and a verdict.

    `tests` hold the op to what the library promises: as close to float64 as eager in every case and
    dtype, exact modes to the bit, gradients, torch.compile, errors, the example. Without a GPU,
    Triton kernels are interpreted. `cubins` compiles the kernels for every GPU from sm_75 to
    sm_120, and a register spilled is a failure. `gpu` runs the tests there, and `benchmark` times
    the op beside PyTorch and torch.compile at the shapes of its cases. Exits with 1 if not good.
    """
    from ..checking import check as checking
    from ..checking.page import page
    from ..errors import BadSetting

    try:
        report = checking.check(
            name, only.split(",") if only else (), target.split(",") if target else ()
        )
    except BadSetting as wrong:
        raise typer.BadParameter(str(wrong), param_hint=wrong.option) from None
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
    else:
        Console().print(page(report))
    raise typer.Exit(0 if report.good else 1)
