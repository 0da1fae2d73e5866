"""`kernelwright demo`: the ops beside a model's own modules, on the activations of a real forward.

A small LTX-Video transformer is built from its diffusers config with random weights. Hooks keep
what flows through its last block during one denoise step; each op gets the same inputs as the
modules it stands for, and its result is held against theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..backends import installed
from ..bench import timing
from ..doctor import choose
from ..ops.case import Case, Inputs
from ..ops.op import Composite, Op, registry
from .ltx import LtxSize, denoise
from .sites import Site, ltx_sites

# on a GPU the width of LTX-Video 2B, and 25 frames of 480 x 704
REAL_WIDTH = LtxSize(heads=32, latent=(4, 15, 22), text_tokens=128, caption_channels=4096)
TINY = LtxSize(heads=4, latent=(3, 6, 8), text_tokens=16, caption_channels=64)


class CannotRun(RuntimeError):
    """The demo lacks something; the message says what to do."""


@dataclass(frozen=True)
class Row:
    """One op: relative error against float64, whether the exact mode has eager's bits (None if the
    op has none), and microseconds a call."""

    op: str
    where: str
    backend: str
    eager_error: float
    error: float
    allowed_error: float
    exact: str | None
    equal: bool | None
    eager_us: float
    us: float

    @property
    def passed(self) -> bool:
        return self.equal is not False and self.error <= self.allowed_error


@dataclass(frozen=True)
class Result:
    """The denoise step and a row for every op."""

    device: str
    dtype: str
    model: str
    step_ms: float
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def run(device: str | None, console: Console) -> Result:
    """Take one denoise step in plain diffusers, then run every op on what flowed through it."""
    if not installed("diffusers"):
        raise CannotRun("diffusers is not installed: pip install 'kernelwright[models]'")
    place = _device(device)
    dtype = _dtype(place)
    size = REAL_WIDTH if place.type == "cuda" else TINY
    columns = (SpinnerColumn(), "{task.description}", TimeElapsedColumn())
    with torch.no_grad(), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("one denoise step of a small LTX-Video in plain diffusers")
        step = denoise(size, place, dtype)
        sites = {s.op: s for s in ltx_sites(step)}
        rows = []
        for op in registry().values():
            progress.update(task, description=f"{op.name}")
            site = sites.get(op.name) or _own_case(op, place, dtype)
            rows.append(_row(op, site, place))
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
    return Result(name, str(dtype).removeprefix("torch."), str(size), step.ms, tuple(rows))


def page(result: Result) -> RenderableType:
    """The result for the terminal."""
    on_gpu = result.device != "CPU"
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("op\n  stands for", no_wrap=True, max_width=24)
    for name in ("error\neager", "\nours"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("exact mode:\nsame bits?", no_wrap=True)
    for name in ("µs\neager", "\nours"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("\nbackend", no_wrap=True)
    for r in result.rows:
        same = {True: Text("yes", "green"), False: Text("NO", "bold red"), None: Text("–")}[r.equal]
        table.add_row(
            Text.assemble(r.op, "\n  ", (r.where, "dim")),
            f"{r.eager_error:.1e}",
            Text(f"{r.error:.1e}", "" if r.error <= r.allowed_error else "bold red"),
            Text.assemble(same, (f" {r.exact}" if r.exact else "", "dim")),
            *(Text(f"{t:.0f}", "" if on_gpu else "dim") for t in (r.eager_us, r.us)),
            r.backend,
        )
    intro = (
        f"{result.model}, random weights, {result.dtype} on {result.device}: "
        f"one denoise step in plain diffusers, {result.step_ms:.0f} ms"
    )
    notes = ["error: ‖y − t‖ / ‖t‖, t in float64 from the same inputs"]
    if on_gpu:
        notes.append("time: median CUDA graph replay over buffers larger than the L2 cache")
    else:
        notes.append(
            "no GPU in use: the ops ran their PyTorch reference, and exact modes the eager chain "
            "itself, so the times compare nothing; kernels need an NVIDIA GPU"
        )
    return Group(Text(intro), table, *(Text(n, style="dim") for n in notes))


def _device(asked: str | None) -> torch.device:
    if asked is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise CannotRun(f"--device {asked}: {str(error).splitlines()[0]}") from error
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type != "cuda" or (device.index or 0) >= count:
        raise CannotRun(f"--device {asked}: torch sees {count} CUDA GPUs; `kernelwright doctor`")
    return torch.device("cuda", device.index or 0)


def _dtype(device: torch.device) -> torch.dtype:
    """What models run in there: many CPUs multiply bfloat16 matrices fifty times slower."""
    if device.type == "cpu":
        return torch.float32
    half = torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if half else torch.bfloat16


def _own_case(op: Op | Composite, device: torch.device, dtype: torch.dtype) -> Site:
    """For an op that LTX-Video has no use for: its first case, against its own eager chain."""
    on_gpu = device.type == "cuda"
    cases: list[Case] = [c for c in op.cases if c.large == on_gpu] or list(op.cases)
    case = next((c for c in cases if c.preset == "ltx"), cases[0])
    chain = next(iter(op.exact), None)
    eager = op.exact[chain] if chain else op.reference

    def run_eager(arguments: dict[str, Any]) -> Any:
        if isinstance(op, Composite):
            return eager(**arguments)
        return eager(*(arguments[n] for n in op.arguments))

    arguments = case.arguments(Inputs(dtype, str(device)))
    return Site(op.name, f"its case “{case.name}”", arguments, op.call, run_eager, chain)


def _backend(
    op: Op | Composite, arguments: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> str:
    if isinstance(op, Op) and set(op.arguments) <= arguments.keys():
        return op.choose(tuple(arguments[n] for n in op.arguments), None).backend
    return choose(op, device, dtype).backend


def _row(op: Op | Composite, site: Site, device: torch.device) -> Row:
    expected = site.eager(site.arguments) if site.expected is None else site.expected
    got = site.ours(site.arguments)
    wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in site.arguments.items()}
    truth = site.ours(wide, backend="torch")
    eager_error = _error(expected, truth)
    first = next(v for v in site.arguments.values() if isinstance(v, Tensor))
    equal = None
    if site.exact:
        exact = site.ours(site.arguments, exact=site.exact)
        equal = all(torch.equal(a, b) for a, b in zip(_all(exact), _all(expected), strict=True))
    return Row(
        op=op.name,
        where=site.where,
        backend=_backend(op, site.arguments, device, first.dtype),
        eager_error=eager_error,
        error=_error(got, truth),
        # eager's own error and one rounding of the output
        allowed_error=eager_error + torch.finfo(first.dtype).eps / 2,
        exact=site.exact,
        equal=equal,
        eager_us=_microseconds(site.eager, site.arguments, device),
        us=_microseconds(site.ours, site.arguments, device),
    )


def _all(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _error(result: Any, truth: Any) -> float:
    """The largest ‖y − t‖ / ‖t‖ over the outputs."""
    errors = []
    for y, t in zip(_all(result), _all(truth), strict=True):
        norm = torch.linalg.vector_norm(t)
        errors.append(float(torch.linalg.vector_norm(y.double() - t) / norm) if norm else 0.0)
    return max(errors)


def _microseconds(
    function: Callable[[dict[str, Any]], Any], arguments: dict[str, Any], device: torch.device
) -> float:
    """Time of one call: GPU time over rotated copies, or the wall clock on the CPU."""
    if device.type != "cuda":
        return median(_seconds(function, arguments) for _ in range(5)) * 1e6
    sets = [arguments]
    for _ in range(timing.rotation(timing.bytes_of(list(arguments.values())), device)):
        sets.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()})
    with torch.cuda.device(device):
        return timing.gpu_us(function, sets)


def _seconds(function: Callable[[dict[str, Any]], Any], arguments: dict[str, Any]) -> float:
    start = time.perf_counter()
    function(arguments)
    return time.perf_counter() - start
