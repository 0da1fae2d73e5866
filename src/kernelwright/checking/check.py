"""Every check of one op: its promises, its cubins, its benchmark, and a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from .. import backends as devices
from .. import catalog
from ..errors import BadSetting, CannotRun
from ..ops.op import Composite, Op, registry
from .conditions import interpret_without_gpu
from .cubins import Cubin, cubins
from .emulator import Emulator, of_small_cases
from .emulator import problem as emulator_problem
from .planned_kernels import TARGETS
from .promises import kernels_here, promises

BACKENDS = ("torch", "triton", "cuda")
PARTS = ("tests", "cubins", "gpu", "benchmark")
# what the benchmark compares a kernel with
PEERS = ("torch", "compile")
NO_GPU = "no GPU here"


@dataclass(frozen=True)
class Part:
    """The result of one part; `skipped` says why it did not run, `rows` are its figures."""

    name: str
    summary: str = ""
    failures: tuple[str, ...] = ()
    skipped: str | None = None
    seconds: float = 0.0
    rows: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Report:
    """The results of all parts for one op."""

    op: str
    formula: str
    parts: tuple[Part, ...]

    @property
    def good(self) -> bool:
        ran = any(not part.skipped for part in self.parts)
        return ran and not any(part.failures for part in self.parts)

    @property
    def verdict(self) -> str:
        """One line: good, good as far as it was checked, or what is wrong."""
        wrong = [f"{len(p.failures)} in {p.name}" for p in self.parts if p.failures]
        if wrong:
            return f"not good: {', '.join(wrong)}"
        ran = [p.name for p in self.parts if not p.skipped]
        if not ran:
            return "nothing was run"
        left = [name for name in PARTS if name not in ran]
        return f"good so far; not run: {', '.join(left)}" if left else "good"

    def as_dict(self) -> dict[str, Any]:
        return {"good": self.good, "verdict": self.verdict, **asdict(self)}


def check(
    name: str,
    only: Sequence[str] = (),
    targets: Sequence[str] = (),
    backends: Sequence[str] = (),
    all_cases: bool = False,
) -> Report:
    """Check one op: all parts or `only` some, of all `backends` or some, cubins for all `targets`
    or some, of its largest case or of all. Raises BadSetting for an unknown name."""
    for option, given, known in (
        ("--only", only, PARTS),
        ("--target", targets, tuple(TARGETS)),
        ("--backend", backends, BACKENDS),
    ):
        for value in given:
            if value not in known:
                raise BadSetting(option, f"{value!r}, expected any of {', '.join(known)}")
    interpret_without_gpu()
    try:
        catalog.entry(name)
    except KeyError as error:
        raise BadSetting(
            "NAME", f"{error.args[0]} (an op of your own package is known once pip installed it)"
        ) from None
    op = registry()[name]
    for backend in backends:
        if backend not in op.backends:
            has = ", ".join(op.backends)
            raise BadSetting("--backend", f"{backend!r}: {name} has {has}")
    written = [b for b in op.backends if b in ("triton", "cuda") and b in (backends or BACKENDS)]
    runs: dict[str, Callable[[], Part]] = {
        "tests": lambda: _tests(op, "cpu", backends),
        "cubins": lambda: _cubins(op, written, targets or tuple(TARGETS), all_cases),
        "gpu": lambda: _on_gpu(op, written, backends),
        "benchmark": lambda: _benchmark(op),
    }
    parts = []
    for part in only or PARTS:
        begin = time.perf_counter()
        found = runs[part]()
        parts.append(replace(found, name=part, seconds=round(time.perf_counter() - begin, 1)))
    return Report(name, op.formula, tuple(parts))


def _tests(op: Op | Composite, device: str, only: Sequence[str] = ()) -> Part:
    emulator, unseen = None, ""
    if device == "cpu" and "cuda" in op.backends and (not only or "cuda" in only):
        emulator, unseen = _emulator(op)
    every = list(promises(op, device, only, emulator))
    failures, rows = [], []
    for promise in track(
        every, f"{op.name} on {device}", console=Console(stderr=True), transient=True
    ):
        why = promise.broken()
        rows.append({"promise": promise.name, "broken": why})
        if why is not None:
            failures.append(f"{promise.name}: {why}")
    how = "interpreted" if device == "cpu" else "on the GPU"
    ran = [f"{b} {how}" for b in kernels_here(op, device) if not only or b in only]
    ran += ["cuda emulated by g++"] if emulator else []
    with_kernels = " and ".join(ran) or "plain PyTorch alone: no kernel runs here"
    held = len(every) - len(failures)
    summary = f"{held} of {len(every)} hold, {with_kernels}{unseen}"
    return Part("tests", summary, tuple(failures), rows=tuple(rows))


def _emulator(op: Op | Composite) -> tuple[Emulator | None, str]:
    """The op's CUDA kernels for the CPU, or why there are none."""
    if torch.cuda.is_available() or not isinstance(op, Op):
        return None, ""
    why = emulator_problem()
    if why is None:
        with Console(stderr=True).status(f"compiling the cuda kernels of {op.name} for the CPU"):
            try:
                return of_small_cases(op), ""
            except Exception as error:  # a plan that fails is a failure of `cubins`
                why = (str(error).splitlines() or ["?"])[0]
    return None, f"; cuda is not emulated: {why}"


def _on_gpu(op: Op | Composite, written: Sequence[str], only: Sequence[str] = ()) -> Part:
    if not torch.cuda.is_available():
        return Part("gpu", skipped=f"{NO_GPU}: run this again where one is")
    found = _tests(op, "cuda", only)
    at = torch.device("cuda", torch.cuda.current_device())
    missing = [b for b in written if b not in kernels_here(op, "cuda")]
    cannot = tuple(f"{b} did not run: {devices.problem(b, at, torch.float32)}" for b in missing)
    return replace(found, failures=(*found.failures, *cannot))


def _cubins(
    op: Op | Composite, written: Sequence[str], targets: Sequence[str], all_cases: bool
) -> Part:
    if not isinstance(op, Op):
        return Part("cubins", skipped="made of other ops: no kernel of its own")
    if not written:
        return Part("cubins", skipped="plain PyTorch has no kernel to compile")
    found: list[Cubin] = []
    failures = []
    for backend in written:
        with Console(stderr=True).status(f"compiling the {backend} kernels of {op.name}"):
            try:
                found += cubins(op, backend, targets, all_cases)
            except CannotRun as error:
                failures.append(str(error))
    spilled = [c for c in found if c.used.spills]
    failures += [
        f"{c.arch} {c.kernel}: spills {c.used.stores} bytes, stack {c.used.stack}" for c in spilled
    ]
    stacked = [c for c in found if c.used.stack and not c.used.spills]
    cases = "all cases" if all_cases else f"the largest of {len(op.cases)} cases (--all-cases)"
    summary = f"{len(found)} kernels of {cases} for {', '.join(targets)}; {len(spilled)} spill"
    if stacked:
        most = max(c.used.stack for c in stacked)
        summary += f"; {len(stacked)} use up to {most} bytes of stack without a spill: no failure"
    return Part("cubins", summary, tuple(failures), rows=tuple(asdict(c) for c in found))


def _benchmark(op: Op | Composite) -> Part:
    if not torch.cuda.is_available():
        return Part("benchmark", skipped=f"{NO_GPU}: a time on the CPU says nothing of a kernel")
    from ..bench import ops as bench

    try:
        rows, _ = bench.run([op.name], peers=PEERS)
    except CannotRun as no:
        return Part("benchmark", skipped=str(no))
    failures = bench.failures(rows)
    return Part("benchmark", f"{len(rows)} shapes timed", tuple(failures), rows=tuple(rows))
