"""`kernelwright bench generate`: language models that generate."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .bench_ops import JsonOption, OutOption
from .one_line_errors import one_line_errors
from .wide_tables import show


def generate(
    presets: Annotated[
        list[str] | None,
        typer.Argument(help="Language models (kernelwright models); llama-3-8b by default."),
    ] = None,
    config: Annotated[
        str,
        typer.Option(
            help="What to compare, comma-separated: eager (with transformers' default cache, which "
            "grows); eager+static; compile (a static cache and transformers' own torch.compile); "
            "exact, fused or fp8, with +graphs on a static cache."
        ),
    ] = "eager,eager+static,compile,exact,exact+graphs,fused+graphs,fp8+graphs",
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 96,
    layers: Annotated[
        int | None, typer.Option(help="Build at most so many layers, at full width.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small models of the same kind.")] = False,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1 or cpu. By default an idle GPU.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16 or float32. By default bfloat16, on a CPU float32."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time spent on each configuration.")] = 2.0,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time `model.generate(...)`: tokens a second, time to the first token, first call.

    Each configuration is compared with the un-injected run that has the same cache: exact must give
    its tokens and the bits of all its logits. Exits with 1 if it does not. A dynamic and a static
    cache give different bits also without injection, because their attention kernels differ.
    """
    from ..bench import generation
    from ..bench.generation_table import table
    from ..bench.models_table import notes

    with one_line_errors("bench generate", ValueError):
        rows = generation.run(
            presets or [],
            config.split(","),
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
    raise typer.Exit(1 if any("failed" in row for row in rows) else 0)
