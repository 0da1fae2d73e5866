"""Options and arguments that several commands have, in the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SIZE = "Size of the input (the preset's own by default)"

Device = Annotated[
    str | None,
    typer.Option(
        help="cuda, cuda:1, ... or cpu. By default an idle GPU; without one, the CPU for --tiny."
    ),
]
DeviceOrCpu = Annotated[
    str | None,
    typer.Option(help="cuda, cuda:1, ... or cpu. By default an idle GPU, or else the CPU."),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="bfloat16, float16 or float32. By default bfloat16; on a CPU float32."),
]
Tiny = Annotated[
    bool,
    typer.Option("--tiny", help="A model of the same kind with few small layers: runs on a CPU."),
]
Layers = Annotated[
    int | None,
    typer.Option(help="Build at most this many layers of each kind of block, at full width."),
]


def _not_negative(seconds: float) -> float:
    # not by `min`, which would be written beside the type: "<float range> [x>=0.0]"
    if seconds < 0:
        raise typer.BadParameter("it must be 0 or more")
    return seconds


Seconds = Annotated[
    float,
    typer.Option(callback=_not_negative, help="Seconds spent on timing each configuration."),
]
Frames = Annotated[int | None, typer.Option(help="Frames of a video.", rich_help_panel=SIZE)]
Height = Annotated[int | None, typer.Option(help="Height in pixels.", rich_help_panel=SIZE)]
Width = Annotated[int | None, typer.Option(help="Width in pixels.", rich_help_panel=SIZE)]
BatchSize = Annotated[int | None, typer.Option(help="Inputs in one batch.", rich_help_panel=SIZE)]
Tokens = Annotated[
    int | None, typer.Option(help="Tokens of a language model.", rich_help_panel=SIZE)
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        help="Also write the results to this JSON file, for `kernelwright report` and `compare`.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of a table, for other programs.")
]
