"""The `kernelwright` command: each subcommand calls one function and prints its result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .commands import bench, hub, skill, video
from .commands.check import check
from .commands.new import new
from .commands.profile import profile
from .commands.report import compare, report

app = typer.Typer(
    name="kernelwright",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench.app.command("video")(video.bench_video)
app.add_typer(bench.app, name="bench")
app.add_typer(hub.app, name="hub")
app.add_typer(skill.app, name="skill")
for command in (video.generate, profile, report, compare, new, check):
    app.command()(command)

JsonOption = bench.JsonOption


def _version(asked: bool) -> None:
    if asked:
        from . import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fused GPU kernels for diffusers and transformers models. The same bits, faster.

    Start with `kernelwright doctor`: it shows what this machine can run. Then `kernelwright ops`
    lists the kernels, `kernelwright inspect ltx-video` shows where a model would use them, and
    `kernelwright demo` generates frames with and without them.
    """


@app.command()
def doctor(
    exact: Annotated[
        bool, typer.Option("--exact", help="Compare exact modes with the installed PyTorch.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write what --exact compared to this result file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what this machine can run, and which backend each op will use on it.

    Checks the driver, the GPUs and which of them are idle, torch, Triton, NVRTC and its headers,
    and the folder where compiled kernels are cached. Exits with 0 when kernelwright is usable (also
    without a GPU: the ops then run their PyTorch reference), and with 1 and one line that says what
    to do when it is not.

    With --exact every sum and function that exact modes repeat is compared with the installed
    PyTorch, in a few seconds: the table says which chains have its bits here, and which run eager.
    What is found is kept beside the compiled kernels.
    """
    console = Console()
    with Console(stderr=True).status("looking at this machine"):
        from . import doctor as machine

        report = machine.examine(exact or out is not None)
        if out is not None:
            machine.write(out, report)
    if as_json:
        _print_json(report.as_dict())
    else:
        console.print(machine.page(report))
    raise typer.Exit(0 if report.usable else 1)


@app.command()
def ops(
    name: Annotated[str | None, typer.Argument(help="One op, to see it in full.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the ops: what each computes, its backends, and the eager chains it can equal exactly.

    With a NAME: its signature and documentation, its exact modes, and the cases that test it.

    `exact` names an eager chain: `rmsnorm(x, exact="diffusers")` gives the bits of diffusers'
    RMSNorm.
    """
    from . import catalog

    if name is None:
        listed = catalog.entries()
        if as_json:
            _print_json([e.as_dict() for e in listed])
        else:
            Console().print(catalog.table(listed))
        return
    try:
        entry = catalog.entry(name)
    except KeyError as error:
        raise typer.BadParameter(error.args[0], param_hint="NAME") from None
    if as_json:
        _print_json(entry.as_dict())
    else:
        Console().print(catalog.page(entry))


@app.command()
def inspect(
    model: Annotated[
        str,
        typer.Argument(help="A preset (`kernelwright models`), a local folder, or a Hub id."),
    ],
    tiny: Annotated[bool, typer.Option("--tiny", help="The small model of the preset.")] = False,
    numerics: Annotated[str, typer.Option(help="exact, fused or fp8.")] = "exact",
    programs: Annotated[
        bool,
        typer.Option("--programs", help="The blocks of a preset as programs of the fuser."),
    ] = False,
    cuda: Annotated[
        bool, typer.Option("--cuda", help="With --programs: the CUDA source of each, too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the structure of a model, and what `inject` would do with each part of it, or why not.

    Only the config is loaded and the model is built on the meta device, so a 12B model takes a
    second. Prints one row for every module that could be fused: where it is, its class, how many
    there are, whether it has a weight, and what replaces it.
    """
    if programs:
        _inspect_programs(model, tiny, cuda, as_json)
        return
    from . import inspect as look
    from .inject.report.table import architecture

    with Console(stderr=True).status(f"building {model} without weights"):
        from . import models

        try:
            built = models.load(model, tiny=tiny, device="meta")
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error), param_hint="MODEL") from None
        try:
            report = look(built, numerics=numerics)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--numerics") from None
    if as_json:
        _print_json(report.to_dict())
        return
    console = Console()
    console.print(architecture(report))
    console.print(report.summary)


def _inspect_programs(model: str, tiny: bool, cuda: bool, as_json: bool) -> None:
    from . import models as known
    from .commands import inspect_programs

    if model not in known.presets():
        presets = ", ".join(known.presets())
        raise typer.BadParameter(
            f"programs are shown for presets, whose inputs are known: {presets}", param_hint="MODEL"
        )
    with Console(stderr=True).status(f"writing the blocks of {model} down"):
        try:
            lines = list(inspect_programs.shown(model, tiny, cuda))
        except RuntimeError as error:  # what reads values needs a model that has some
            hint = "" if tiny else "; --tiny runs a small one"
            raise typer.BadParameter(f"{error}{hint}", param_hint="MODEL") from None
    if as_json:
        _print_json({"model": model, "programs": lines})
    else:
        typer.echo("\n".join(lines))


@app.command()
def models(as_json: JsonOption = False) -> None:
    """List the presets: real models built from their configs with random weights, no download."""
    from . import models as known

    found = known.presets().values()
    if as_json:
        _print_json([{"name": p.name, "title": p.title, "sizes": dict(p.sizes)} for p in found])
    else:
        Console().print(known.table())


@app.command()
def demo(
    device: Annotated[
        str | None,
        typer.Option(help="Where to run: cuda, cuda:1 or cpu. By default an idle GPU."),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="LTX-Video 2B at 49 frames of 768 × 512, not the tiny model."),
    ] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write a picture of the frames before and after.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Generate frames with an LTX-Video pipeline before and after injection, and compare them.

    The pipeline (T5 encoder, transformer, VAE, scheduler) is built from its configs with random
    weights: nothing is downloaded. It runs in plain diffusers, injected in each tier, and restored.
    The output shows what was replaced, whether the frames have the same bits, their error against a
    float32 run, and the time of a denoising step. Times on the CPU say nothing.
    """
    from . import demo as shown
    from .errors import BadSetting, CannotRun

    try:
        result = shown.run(device, Console(stderr=True), full=full, save=save)
    except BadSetting as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from None
    except CannotRun as error:
        typer.echo(f"kernelwright demo: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        _print_json(result.as_dict())
    else:
        Console().print(shown.page(result))
    raise typer.Exit(0 if result.passed else 1)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
