"""`kernelwright bench train`: one training step of whole models."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from . import shared_options as option
from .command_line import spaced, split
from .one_line_errors import one_line_errors
from .wide_tables import show

DEFAULT = "eager,compile,compile+graphs,exact,exact+graphs,fused,fused+graphs,liger"


def train(
    presets: Annotated[
        list[str],
        typer.Argument(metavar="PRESET", help="Models that `kernelwright models` lists."),
    ],
    lora: Annotated[
        int | None,
        typer.Option(
            help="Train LoRA adapters of this rank around attention's projections (peft)."
        ),
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations in the backward pass.")
    ] = False,
    attention: Annotated[
        str,
        typer.Option(
            help="Attention of all configurations: default (PyTorch's choice), math, flash, "
            "efficient or cudnn."
        ),
    ] = "default",
    config: Annotated[
        str,
        typer.Option(
            show_default=spaced(DEFAULT),
            help="What to compare, comma-separated: eager, liger, compile alone or with +graphs; "
            "exact or fused, alone, with +graphs or with +compile.",
        ),
    ] = DEFAULT,
    steps: Annotated[
        int, typer.Option(min=1, help="Training steps whose losses are compared.")
    ] = 20,
    layers: option.Layers = None,
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
        typer.Option("--error/--no-error", help="Whether to compare gradients with a float32 run."),
    ] = True,
    out: option.OutOption = None,
    as_json: option.JsonOption = False,
) -> None:
    """Time one training step (forward, loss, backward): eager, torch.compile, injected, Liger.

    Before it is timed, each configuration trains a fresh copy of the model with AdamW and PyTorch's
    deterministic algorithms; the gradients of its first step and its losses are compared with
    eager's. exact must give the bits of both; exits with 1 if it does not.
    """
    from ..bench import training
    from ..bench.models_table import notes
    from ..bench.training_table import table

    sizes = {"frames": frames, "height": height, "width": width, "batch": batch_size}
    sizes["tokens"] = tokens
    if tokens is not None and tokens < 2:
        raise typer.BadParameter(
            "a loss compares each token with the next: at least 2", param_hint="--tokens"
        )
    with one_line_errors("bench train", ValueError):
        rows = training.run(
            presets,
            split(config),
            {name: size for name, size in sizes.items() if size is not None},
            lora=lora,
            checkpointing=checkpointing,
            attention=attention,
            steps=steps,
            tiny=tiny,
            device=device,
            dtype=dtype,
            seconds=seconds,
            with_error=error,
            layers=layers,
            out=out,
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        show(table(rows), notes(rows))
    failed = any("failed" in row and "unavailable" not in row for row in rows)
    raise typer.Exit(1 if failed or not any("ms" in row for row in rows) else 0)
