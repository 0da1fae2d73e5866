"""The `kernelwright` command. Thin: every command calls one function and prints what it returns."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    name="kernelwright",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


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

    Start with `kernelwright doctor`: it says what this machine can run. Then `kernelwright ops`
    lists the kernels, and `kernelwright demo` holds them against a real model's own modules.
    """


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Say what this machine can run, and which backend each op will use on it.

    Looks at the driver, the GPUs and which of them are idle, torch, Triton, NVRTC and its headers,
    and the folder where compiled kernels are kept. Exits with 0 when kernelwright is usable (it is
    without a GPU too: the ops run their PyTorch reference), and with 1 and one line that says what
    to do when it is not.
    """
    console = Console()
    with Console(stderr=True).status("looking at this machine"):
        from . import doctor as machine

        report = machine.examine()
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

    `exact` names an eager chain: `rmsnorm(x, exact="diffusers")` gives the bits of its RMSNorm.
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
def demo(
    device: Annotated[
        str | None,
        typer.Option(help="Where to run: cuda, cuda:1 or cpu. The GPU if there is one."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Hold the ops against a model's own modules, on the activations of a real forward pass.

    Builds a small LTX-Video transformer from its diffusers config with random weights (nothing is
    downloaded), takes one denoise step in plain diffusers, and runs each op on what flowed through
    it. The table shows the error of both against float64, whether the exact mode gives the same
    bits, and the time. On the CPU the ops run their PyTorch reference, and times say nothing.
    """
    from . import demo as shown

    try:
        result = shown.run(device, Console(stderr=True))
    except shown.CannotRun as error:
        typer.echo(f"kernelwright demo: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        _print_json(result.as_dict())
    else:
        Console().print(shown.page(result))
    raise typer.Exit(0 if result.passed else 1)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
