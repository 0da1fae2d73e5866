"""`kernelwright bench train`: one training step of whole models."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .bench_ops import JsonOption, OutOption
from .one_line_errors import one_line_errors
from .wide_tables import show


def train(
    presets: Annotated[list[str], typer.Argument(help="Presets (`kernelwright models`).")],
    lora: Annotated[
        int | None,
        typer.Option(
            help="Train LoRA adapters of this rank around attention's projections (peft)."
        ),
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute blocks in the backward.")
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
            help="What to compare, comma-separated: eager, compile, liger; exact or fused, alone, "
            "with +graphs or with +compile."
        ),
    ] = "eager,compile,exact,fused,liger",
    steps: Annotated[int, typer.Option(min=1, help="Losses to compare.")] = 20,
    layers: Annotated[
        int | None,
        typer.Option(help="Build at most so many layers of each kind of block, at full width."),
    ] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a video.")] = None,
    height: Annotated[int | None, typer.Option(help="Height in pixels.")] = None,
    width: Annotated[int | None, typer.Option(help="Width in pixels.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Inputs in one batch.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a language model.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small models of the same kind.")] = False,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1 or cpu. By default an idle GPU.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16 or float32. By default bfloat16, on a CPU float32."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time spent on each configuration.")] = 2.0,
    error: Annotated[
        bool, typer.Option("--error/--no-error", help="Compare gradients with a float32 run.")
    ] = True,
    out: OutOption = None,
    as_json: JsonOption = False,
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
    with one_line_errors("bench train", ValueError):
        rows = training.run(
            presets,
            config.split(","),
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
