"""`kernelwright bench generate`: language models that generate."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from . import shared_options as option
from .command_line import spaced, split
from .one_line_errors import one_line_errors
from .wide_tables import show

DEFAULT = "eager,eager+static,compile,exact,exact+graphs,fused+graphs,fp8+graphs,liger"


def generate(
    presets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PRESET",
            help="Language models of `kernelwright models`; llama-3-8b by default.",
        ),
    ] = None,
    config: Annotated[
        str,
        typer.Option(
            show_default=spaced(DEFAULT),
            help="What to compare, comma-separated: eager (with transformers' default cache, which "
            "grows); eager+static; compile (a static cache and transformers' own torch.compile); "
            "liger; exact, fused or fp8, with +programs (recipes=False), with +graphs (on a static "
            "cache) or with both.",
        ),
    ] = DEFAULT,
    batch: Annotated[int, typer.Option(min=1, help="Sequences generated at once.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 96,
    layers: option.Layers = None,
    tiny: option.Tiny = False,
    device: option.Device = None,
    dtype: option.Dtype = None,
    seconds: option.Seconds = 2.0,
    out: option.OutOption = None,
    as_json: option.JsonOption = False,
) -> None:
    """Time text generation of language models: tokens/s, time to the first token, first call.

    Calls transformers' `model.generate`. Each configuration is compared with the run without
    injection that has the same cache: exact must give its tokens and the bits of all its logits.
    Exits with 1 if it does not. A dynamic and a static cache give different bits also without
    injection, because their attention kernels differ.
    """
    from ..bench import generation
    from ..bench.generation_table import table
    from ..bench.models_table import notes

    with one_line_errors("bench generate", ValueError):
        rows = generation.run(
            presets or [],
            split(config),
            batch=batch,
            prompt=prompt,
            new=new,
            layers=layers,
            tiny=tiny,
            device=device,
            dtype=dtype,
            seconds=seconds,
            out=out,
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        show(table(rows), notes(rows))
    failed = any("failed" in row and "unavailable" not in row for row in rows)
    raise typer.Exit(1 if failed or not any("ms" in row for row in rows) else 0)
