"""`kernelwright new`: a working op to start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .bench import JsonOption


def new(
    name: Annotated[str, typer.Argument(help="The op's name, such as softcap.")],
    language: Annotated[
        str,
        typer.Option(
            help="What the kernel is written in: triton, cuda, or triton,cuda for both in one op.",
            show_default=False,
        ),
    ],
    kind: Annotated[
        str,
        typer.Option(
            help="What to start from: elementwise, gated, row-reduction or gated-row-reduction."
        ),
    ] = "elementwise",
    out: Annotated[
        Path | None,
        typer.Option(help="Create a separate package in this folder, not a folder under ops/."),
    ] = None,
    backward: Annotated[
        bool,
        typer.Option(
            "--backward", help="Add a Triton kernel for the gradients: elementwise and gated."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Create a new op: a working kernel with reference, cases, tests and benchmark, to change.

    The kernel is in the language that you name, never in the other. In a checkout of kernelwright
    the op is a folder under `ops/`, and the tests, `bench ops` and `ops` find it there. With
    `--out` it is a package that pip installs, and kernelwright finds it by an entry point.

    The kinds: `elementwise` is x · sigmoid(beta · x), `gated` is sigmoid(gate) · up,
    `row-reduction` divides rows by their norm, and `gated-row-reduction` is
    RMSNorm(x · SiLU(gate)) · weight over groups of a row, with an exact mode in CUDA C++. Change
    the reference first, then the kernel, and run `kernelwright check NAME` after every step.
    """
    from .. import scaffold
    from ..errors import CannotRun

    named = language.split(",")
    if not set(named) <= set(scaffold.LANGUAGES) or len(set(named)) != len(named):
        raise typer.BadParameter(
            f"{language!r}, expected triton or cuda, or both: triton,cuda", param_hint="--language"
        )
    if kind not in scaffold.KINDS:
        raise typer.BadParameter(
            f"{kind!r}, expected {', '.join(scaffold.KINDS)}", param_hint="--kind"
        )
    try:
        created = scaffold.create(name, language, kind, out, backward=backward)
    except scaffold.BadName as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None
    except CannotRun as error:
        typer.echo(f"kernelwright new: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(created.as_dict(), indent=2))
    else:
        Console().print(scaffold.page(created))
