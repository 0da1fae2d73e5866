"""`kernelwright hub`: the ops as a package for the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import track

from .bench import JsonOption
from .command_line import CommandLine

app = CommandLine(
    help="Hugging Face Kernels: build, check and export our package.",
)
OutOption = Annotated[Path, typer.Option(help="The folder to write to.")]


@app.command()
def build(
    out: OutOption,
    variant: Annotated[
        str,
        typer.Option(help="Comma-separated: torch-cuda, torch-rocm, torch-cpu, torch-universal."),
    ] = "torch-cuda,torch-rocm,torch-cpu,torch-universal",
    as_json: JsonOption = False,
) -> None:
    """Write the kernel package `ltx-kernels` to OUT/build, ready for `kernels` and the Hub.

    It is built from the ops alone, without compiling: Triton kernels and their PyTorch reference,
    with layers for `kernelize`. Load it with `kernels.get_local_kernel(Path(OUT))`, check it
    against the rules of the Hub with `kernelwright hub check OUT`, and time it with `kernels
    benchmark OUT` if OUT is `hub/ltx-kernels`, which contains the benchmark.
    """
    from .. import hub

    try:
        made = hub.build(out, variant.split(","))
    except (OSError, ValueError) as error:
        _stop("build", str(error))
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in made], indent=2))
        return
    for each in made:
        typer.echo(f"{each.path}  {each.files} files, torch.ops.{each.id}")


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="A folder that `hub build` wrote, or a variant.")],
    load: Annotated[
        bool, typer.Option("--load/--no-load", help="Also load the variant for this machine.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Check a kernel package against the rules of the Hub, and say how to fix what it would refuse.

    Layout, metadata, namespaces, relative imports and layers are read from the files of every
    variant; then `get_local_kernel` loads the one for this machine. Exits with 1 if anything fails.
    """
    from .. import hub

    with Console(stderr=True).status("reading the package"):
        failures = hub.check(folder, load)
    if as_json:
        typer.echo(json.dumps([f.as_dict() for f in failures], indent=2))
    else:
        for failure in failures:
            typer.echo(str(failure))
        if not failures:
            typer.echo(f"{folder}: nothing to fix")
    raise typer.Exit(1 if failures else 0)


@app.command()
def source(
    out: OutOption,
    project: Annotated[Path, typer.Option(help="The hand-written part of the project.")] = Path(
        "hub/ltx-kernels"
    ),
    cases: Annotated[
        str,
        typer.Option(help="Shapes to compile for: `models`, or `all` to include those of tests."),
    ] = "models",
) -> None:
    """Write the complete CUDA source project for kernel-builder and Nix.

    To build it here with nvcc instead: `pip install --no-build-isolation ./hub/ltx-kernels-aot`.
    """
    from ..hub import extension

    try:
        with Console(stderr=True).status("planning the kernels of every case"):
            written = extension.export(project, out, cases)
    except (OSError, ValueError) as error:
        _stop("source", str(error))
    typer.echo(f"{out}: {len(written)} files; build it there with `nix run .#build-and-copy`")


@app.command()
def use(
    repositories: Annotated[
        list[str], typer.Argument(help="Kernels, such as kernels-community/activation@v1.")
    ],
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Also load from publishers that the Hub does not trust."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Try kernels from the Hub: which of our ops each could run here, and why not others.

    Each is loaded and must be as accurate as our own kernels on the op's cases. In a program,
    `kernelwright.hub.use(repo_id, version=...)` does the same and makes the ops use it.
    """
    from .. import hub

    tried = []
    console = Console(stderr=True)
    for named in track(repositories, "trying kernels", console=console, transient=True):
        repository, _, version = named.partition("@")
        if not version.lstrip("v").isdigit():
            _stop("use", f"{named}: name its version, as in {repository}@v1")
        try:
            tried.append(
                hub.use(
                    repository,
                    version=int(version.lstrip("v")),
                    trust_remote_code=trust_remote_code,
                )
            )
        except ValueError as error:
            _stop("use", str(error))
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in tried], indent=2))
    else:
        for each in tried:
            typer.echo(str(each))
    raise typer.Exit(0 if all(each.serves for each in tried) else 1)


@app.command()
def bench(
    out: Annotated[Path | None, typer.Option(help="Write the rows to this JSON file.")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Time spent on each backend.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Time the host side of a call: the compiled library, Triton, NVRTC and F.rms_norm.

    Needs a GPU and the library: `pip install --no-build-isolation ./hub/ltx-kernels-aot`.
    """
    from ..hub import host_time

    try:
        rows = host_time.run(out, seconds)
    except ValueError as error:
        _stop("bench", str(error))
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        Console().print(host_time.table(rows))


def _stop(command: str, reason: str) -> NoReturn:
    typer.echo(f"kernelwright hub {command}: {reason}", err=True)
    raise typer.Exit(1)
