"""What this machine can run: GPU, driver, compilers, cache, and the backend of every op."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from .backends import cuda
from .backends.cache import KernelCache
from .calibration import calibrate, dependents, verdicts
from .gpus import Gpu, nvidia_smi, torch_gpu
from .measure import results
from .ops import ways
from .ops.linear import algorithms
from .ops.op import Choice, Composite, Op, registry

# the oldest GPUs that torch's own CUDA 13 builds support
MIN_CAPABILITY = (7, 5)


@dataclass(frozen=True)
class OpBackend:
    """Which backend an op uses on this machine, why, and which one keeps eager's bits."""

    op: str
    backend: str
    reason: str
    exact: str | None


@dataclass(frozen=True)
class ExactSubject:
    """A sum or a function of PyTorch that kernels repeat bit by bit: the way that has its bits here
    (None: none, and its chains run eager), the chains that need it, and what was compared."""

    subject: str
    way: str | None
    chains: tuple[str, ...]
    compared: int | None = None
    differing: int | None = None
    says: str = ""


@dataclass(frozen=True)
class Report:
    """Everything `kernelwright doctor` found. `problem` is None on a usable machine, else one line
    that says what to do; `notes` says what could be improved."""

    system: str
    python: str
    driver: str | None
    gpus: tuple[Gpu, ...]
    torch: str
    torch_cuda: str | None
    torch_gpus: int
    triton: str | None
    cuda_core: str | None
    nvrtc: str | None
    headers: str | None
    cache: str
    cache_writable: bool
    cublaslt: str | None
    ops: tuple[OpBackend, ...]
    exact: tuple[ExactSubject, ...] | None
    problem: str | None
    notes: tuple[str, ...]

    @property
    def usable(self) -> bool:
        return self.problem is None

    def as_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        for shown, gpu in zip(plain["gpus"], self.gpus, strict=True):
            shown["idle"] = gpu.idle
        return {"usable": self.usable, **plain}


def examine(exact: bool = False) -> Report:
    """Examine this machine. Starts no GPU work beyond querying the GPU's name, unless the bits of
    exact modes are to be compared with the installed PyTorch."""
    driver, gpus, smi_error = nvidia_smi()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and count:
        gpus = tuple(torch_gpu(i) for i in range(count))
    cache = KernelCache.default()
    nvrtc, nvrtc_error = _nvrtc()
    headers = next(iter(cuda.include_paths()), None)
    problem = _problem(driver, gpus, count, smi_error)
    ops = _op_backends(count > 0)
    notes = []
    if not count and problem is None:
        notes.append("no NVIDIA GPU: ops run in plain PyTorch, right but not faster")
    if count and nvrtc_error:
        notes.append(f"the cuda backend and exact modes are off: {nvrtc_error}")
    if not cache.writable():
        why = cache.problem() or f"{cache.folder} cannot be written"
        notes.append(
            f"no kernel is kept, and each process compiles again: {why}; or set KERNELWRIGHT_CACHE "
            "to a folder of your own"
        )
    return Report(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        driver=driver,
        gpus=gpus,
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        torch_gpus=count,
        triton=_version("triton"),
        cuda_core=_version("cuda-core"),
        nvrtc=nvrtc,
        headers=headers,
        cache=str(cache.folder),
        cache_writable=cache.writable(),
        cublaslt=algorithms.unnamed(torch.device("cuda", 0)) if count else None,
        ops=ops,
        exact=_exact(exact, count > 0),
        problem=problem or _no_kernels(count, ops),
        notes=tuple(notes),
    )


def page(report: Report) -> RenderableType:
    """The report for the terminal."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")

    def fact(name: str, value: str | None) -> None:
        facts.add_row(name, Text(value) if value else Text("not found", style="yellow"))

    fact("system", f"{report.system}, Python {report.python}")
    fact("driver", report.driver)
    for gpu in report.gpus:
        fact(f"GPU {gpu.index}", _gpu_text(gpu))
    if not report.gpus:
        fact("GPU", None)
    build = f"CUDA {report.torch_cuda}" if report.torch_cuda else "built without CUDA"
    fact("torch", f"{report.torch} ({build}), sees {report.torch_gpus} of {len(report.gpus)} GPUs")
    fact("triton", report.triton)
    fact("cuda-core", report.cuda_core)
    fact("NVRTC", report.nvrtc)
    fact("cuda_bf16.h", report.headers)
    fact("kernel cache", report.cache + ("" if report.cache_writable else " (not writable)"))
    if report.cublaslt:
        fact("GEMM", report.cublaslt)

    ops = Table(
        Column("op", overflow="fold"), *("backend", "exact mode", "why"), header_style="bold"
    )
    for o in report.ops:
        ops.add_row(o.op, o.backend, o.exact or "–", Text(o.reason))
    parts: list[RenderableType] = [facts, ops]
    if report.exact is not None:
        parts += _exact_page(report)
    elif report.torch_gpus:
        parts.append(Text("exact modes were not compared with this PyTorch yet: doctor --exact"))
    parts += [Text(f"note: {n}", style="yellow") for n in report.notes]
    if report.problem:
        parts.append(Text(f"not usable: {report.problem}", style="bold red"))
    else:
        parts.append(Text("usable", style="bold green"))
    return Group(*parts)


def _exact(compare: bool, on_gpu: bool) -> tuple[ExactSubject, ...] | None:
    """What was found of each subject, now or earlier; None if nothing was compared."""
    if not compare:
        found = ways.stored() if on_gpu else None
        if found is None:
            return None
        chains = dependents()
        return tuple(ExactSubject(s, way, tuple(chains[s])) for s, way in found.items())
    findings = calibrate()
    if on_gpu:
        ways.keep(verdicts(findings))
    chains = dependents()
    return tuple(
        ExactSubject(f.subject, f.way, tuple(chains[f.subject]), f.compared, f.differing, str(f))
        for f in findings
    )


def _exact_page(report: Report) -> list[RenderableType]:
    """A table: which chains have eager's bits here, and which run eager and cost speed."""
    columns = "what kernels\nrepeat", "has the\nbits of", "compared", "chains"
    shown = Table(*columns, header_style="bold")
    without = "no kernel: runs eager" if report.torch_gpus else "nothing here"
    for e in report.exact or ():
        ours = Text(e.way) if e.way else Text(without, style="yellow")
        compared = f"{e.compared:,}\n{e.differing:,} differ" if e.compared else ""
        shown.add_row(e.subject, ours, compared, _by_op(e.chains) or "recorded blocks")
    lost = [e.says for e in report.exact or () if e.way is None and e.says]
    parts: list[RenderableType] = [shown, *(Text(line, style="yellow") for line in lost)]
    if not report.torch_gpus:
        parts.append(Text("no GPU: exact modes run PyTorch's own ops here, with its bits"))
    return parts


def _by_op(chains: Iterable[str]) -> str:
    """Each op once, with its chains.

    >>> _by_op(["geglu (torch)", "modulate (diffusers)", "modulate (wan)"])
    'geglu (torch), modulate (diffusers, wan)'
    """
    found: dict[str, list[str]] = {}
    for chain in chains:
        op, _, name = chain.removesuffix(")").partition(" (")
        found.setdefault(op, []).append(name)
    return ", ".join(f"{op} ({', '.join(names)})" for op, names in found.items())


def write(path: Path, report: Report) -> None:
    """The subjects of exact modes as a result file, from which README.md's table is made."""
    results.write(path, "calibration", [asdict(subject) for subject in report.exact or ()])


def _gpu_text(gpu: Gpu) -> str:
    state = {True: "idle", False: "busy", None: "idle or busy: nvidia-smi cannot tell"}[gpu.idle]
    used = "" if gpu.used is None else f", {gpu.used} MiB used, {gpu.busy_percent}% busy"
    major, minor = gpu.capability
    return f"{gpu.name}, capability {major}.{minor}, {gpu.memory} MiB{used}: {state}"


def _problem(
    driver: str | None, gpus: tuple[Gpu, ...], count: int, smi_error: str | None
) -> str | None:
    """One line that says what to do, if there is a GPU that torch cannot use."""
    if count:
        major, minor = torch.cuda.get_device_capability(0)
        if (major, minor) < MIN_CAPABILITY:
            return (
                f"GPU 0 has compute capability {major}.{minor}, kernels need 7.5 or newer: "
                f"choose another GPU with CUDA_VISIBLE_DEVICES"
            )
        return None
    if not gpus:
        if smi_error and Path("/dev/nvidia0").exists():
            return f"the NVIDIA driver does not answer ({smi_error}): reload it or reboot"
        return None
    if torch.version.cuda is None:
        return (
            "an NVIDIA GPU is present but this torch is built without CUDA: "
            "pip install --force-reinstall torch, from an index that has the CUDA build"
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return (
            f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides every GPU: "
            f"unset it, or name one of 0 to {len(gpus) - 1}"
        )
    return (
        f"torch is built for CUDA {torch.version.cuda} and cannot use driver {driver}: "
        f"update the driver, or install a torch built for an older CUDA"
    )


def _no_kernels(count: int, ops: tuple[OpBackend, ...]) -> str | None:
    if count and ops and all(o.backend == "torch" for o in ops):
        return f"no op has a kernel here ({ops[0].reason}): pip install 'kernelwright[cuda]'"
    return None


def _op_backends(on_gpu: bool) -> tuple[OpBackend, ...]:
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    half = on_gpu and torch.cuda.get_device_capability(0) < (8, 0)
    dtype = torch.float16 if half else torch.bfloat16

    def chosen(op: Op | Composite) -> OpBackend:
        choice = choose(op, device, dtype)
        chain = next(iter(op.exact), None)
        exact = choose(op, device, dtype, chain).backend if chain else None
        return OpBackend(op.name, choice.backend, choice.reason, exact)

    return tuple(chosen(op) for op in registry().values())


def choose(
    op: Op | Composite, device: torch.device, dtype: torch.dtype, exact: str | None = None
) -> Choice:
    """The backend an op uses for tensors of this device and dtype, and why."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason is in the result
        return op.choose_for(device, dtype, exact)


def _nvrtc() -> tuple[str | None, str | None]:
    """NVRTC's version, or why it cannot be loaded."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except ImportError:
        return None, "cuda-core is not installed: pip install 'kernelwright[cuda]'"
    except RuntimeError as error:  # the library itself was not found
        return None, f"NVRTC cannot be loaded ({str(error).splitlines()[0]})"
    if int(status) != 0:
        return None, f"NVRTC returns error {int(status)}"
    return f"{major}.{minor}", None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
