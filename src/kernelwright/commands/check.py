"""`kernelwright check`: tests, cubins and benchmark of one op."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from .bench import JsonOption
from .one_line_errors import one_line_errors


def check(
    name: Annotated[str, typer.Argument(help="The op (`kernelwright ops`).")],
    only: Annotated[
        str | None,
        typer.Option(help="Only these parts, comma-separated: tests, cubins, gpu, benchmark."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Cubins for these, comma-separated: sm_75, sm_80, sm_89, ... By default all."
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Only these, comma-separated: torch (the reference, before a kernel is written), "
            "triton, cuda."
        ),
    ] = None,
    all_cases: Annotated[
        bool,
        typer.Option("--all-cases", help="Cubins of every case, not only of the largest."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run every check of one op: tests, cubins, GPU tests and benchmark, and print a verdict.

    `tests` checks what the library promises: as close to float64 as eager in every case and dtype,
    exact modes to the bit, gradients, torch.compile, error messages, the example. Without a GPU,
    Triton kernels are interpreted, and CUDA C++ is compiled by g++ and emulated. `cubins` compiles
    the kernels for every GPU from sm_75 to sm_120; a spilled register is a failure. `gpu` runs the
    tests on the GPU, and `benchmark` times the op against PyTorch and torch.compile at the shapes
    of its cases. Exits with 1 if not good.

    While a kernel is being written, `--backend torch --only tests` checks the reference, arguments
    and cases alone.
    """
    from ..checking import check as checking
    from ..checking.check_table import page

    with one_line_errors("check"):
        report = checking.check(
            name,
            only.split(",") if only else (),
            target.split(",") if target else (),
            backend.split(",") if backend else (),
            all_cases,
        )
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
    else:
        Console().print(page(report))
    raise typer.Exit(0 if report.good else 1)
