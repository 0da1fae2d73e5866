"""The `kernelwright` command: each subcommand calls one function and prints its result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .commands import bench, hub, skill, video
from .commands.check import check
from .commands.command_line import CommandLine, Group
from .commands.new import new
from .commands.profile import profile
from .commands.report import compare, report
from .commands.shared_options import DeviceOrCpu, JsonOption

TIERS = ("exact", "fused", "fp8")
START, MEASURE, EXTEND = "Start here", "Run and measure", "Write and publish kernels"


class _Main(Group):
    order = (
        *("doctor", "demo", "models", "inspect", "ops"),
        *("generate", "bench", "profile", "report", "compare"),
    )


app = CommandLine(
    cls=_Main,
    name="kernelwright",
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench.app.command("video")(video.bench_video)
app.add_typer(bench.app, name="bench", rich_help_panel=MEASURE)
app.command(rich_help_panel=MEASURE)(video.generate)
app.command(rich_help_panel=MEASURE)(profile)
app.command(rich_help_panel=MEASURE)(report)
app.command(rich_help_panel=MEASURE)(compare)
app.command(rich_help_panel=EXTEND)(new)
app.command(rich_help_panel=EXTEND)(check)
app.add_typer(skill.app, name="skill", rich_help_panel=EXTEND)
app.add_typer(hub.app, name="hub", rich_help_panel=EXTEND)


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


@app.command(rich_help_panel=START)
def doctor(
    exact: Annotated[
        bool, typer.Option("--exact", help="Also test here that exact modes give PyTorch's bits.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write what --exact found to this JSON file (implies --exact)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what this machine can run, and which backend each op will use on it.

    Checks the driver, the GPUs and which of them are idle, torch, Triton, NVRTC (which compiles
    the CUDA kernels) and its headers, and the folder where compiled kernels are cached. Exits with
    0 when kernelwright is usable (also without a GPU: the ops then run in plain PyTorch), and with
    1 and one line that says what to do when it is not.

    With --exact every sum and function that an exact kernel has to repeat is compared with the
    installed PyTorch, in a few seconds. The table says which give the same bits here, and which ops
    therefore stay in plain PyTorch. What is found is kept beside the compiled kernels.
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


@app.command(rich_help_panel=START)
def ops(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One op, to see it in full.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the ops: what each computes, its backends, and whose bits it can give.

    With a NAME: its signature and documentation, its exact modes, and the cases that test it.

    An exact mode is named after the code whose bits it gives: `rmsnorm(x, exact="diffusers")` is
    `torch.equal` to diffusers' RMSNorm.
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


@app.command(rich_help_panel=START)
def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name that `kernelwright models` lists, a local folder, or an id on the Hub.",
        ),
    ],
    tiny: Annotated[
        bool, typer.Option("--tiny", help="The small version of a listed model.")
    ] = False,
    numerics: Annotated[
        str, typer.Option(help="Rounding allowed: exact (none), fused or fp8.")
    ] = "exact",
    programs: Annotated[
        bool,
        typer.Option(
            "--programs", help="Print the kernels that would be generated for a model's blocks."
        ),
    ] = False,
    cuda: Annotated[
        bool, typer.Option("--cuda", help="With --programs: also print their CUDA source.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the structure of a model, and what `inject` would do with each part of it, or why not.

    Only the config is read and the model is built without memory for its weights, so a 12B model
    takes some seconds. Prints one row for every module that could be fused: where it is, its class,
    how many there are, whether it has a weight, and what replaces it.
    """
    if programs:
        _inspect_programs(model, tiny, cuda, numerics, as_json)
        return
    if cuda:
        raise typer.BadParameter(
            "prints the source of --programs: give that too", param_hint="--cuda"
        )
    _check_tier(numerics)
    from . import inspect as look
    from .inject.report.architecture import Architecture

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
    console.print(Architecture(report))
    console.print(report.summary)


def _check_tier(numerics: str) -> None:
    if numerics not in TIERS:
        raise typer.BadParameter(
            f"{numerics!r} is none of {', '.join(TIERS)}", param_hint="--numerics"
        )


def _inspect_programs(model: str, tiny: bool, cuda: bool, numerics: str, as_json: bool) -> None:
    from . import models as known
    from .commands import inspect_programs

    if model not in known.presets():
        raise typer.BadParameter(
            f"{model!r} is no preset, and programs are shown for presets, whose inputs are known; "
            f"{known.catalog.suggestion(model)}",
            param_hint="MODEL",
        )
    _check_tier(numerics)
    with Console(stderr=True).status(f"writing the blocks of {model} down"):
        try:
            lines = list(inspect_programs.shown(model, tiny, cuda, numerics))
        except RuntimeError as error:
            why = "" if tiny else f"{model} cannot run without memory for its weights: add --tiny ("
            raise typer.BadParameter(f"{why}{error}{why and ')'}", param_hint="MODEL") from None
    if as_json:
        _print_json({"model": model, "programs": lines})
    else:
        typer.echo("\n".join(lines))


@app.command(rich_help_panel=START)
def models(as_json: JsonOption = False) -> None:
    """List the presets: real models, built from their configs with random weights, not downloaded.

    `inspect`, `profile` and `bench` take these names.
    """
    from . import models as known

    found = known.presets().values()
    if as_json:
        told = ("name", "title", "library", "what")
        _print_json([{n: getattr(p, n) for n in told} | {"sizes": dict(p.sizes)} for p in found])
    else:
        Console().print(known.table())


@app.command(rich_help_panel=START)
def demo(
    device: DeviceOrCpu = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="LTX-Video 2B at 49 frames of 768 × 512, not the tiny model."),
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(help="Write a picture: frames before, after, and their difference."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Generate frames with an LTX-Video pipeline before and after injection, and compare them.

    The pipeline (T5 encoder, transformer, VAE, scheduler) is built from its configs with random
    weights: nothing is downloaded, and the frames are noise. It runs in plain diffusers ("eager"),
    with the kernels injected as `exact` and as `fused`, and restored. The output shows what was
    replaced, whether the frames have the same bits, their error against a float32 run, and the time
    of a denoising step. Without a GPU it shows that the bits are the same, and no speed-up.
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
