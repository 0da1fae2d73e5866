"""Host time of a call by backend: compiled ahead of time, NVRTC, Triton; beside F.rms_norm.

The GPU time of a kernel does not depend on who compiled it; the time to launch it does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ..checking.numerics import as_good_as_eager
from ..measure import results
from ..measure.timing import Timed, host_reading, medians
from ..ops.case import Case, Inputs
from ..ops.op import Op, registry

BACKENDS = ("triton", "cuda", "aot")
EAGER = "F.rms_norm"
# GPU time assumed for a call: `host_reading` then times 100 calls at once
QUEUED_US = 200.0


def run(out: Path | None = None, seconds: float = 1.0) -> list[dict[str, Any]]:
    """Host microseconds of `rmsnorm` at the shapes of models, bfloat16; written to `out`."""
    if not torch.cuda.is_available():
        raise ValueError("no CUDA GPU here, and host time is the time to launch")
    if out is not None:
        results.check_writable(out)
    op = registry()["rmsnorm"]
    assert isinstance(op, Op)
    for backend in BACKENDS:
        op.choose_for(torch.device("cuda", 0), torch.bfloat16, backend=backend)
    cases = [case for case in op.cases if case.large]
    rows = [
        measure(op, case, seconds)
        for case in track(cases, "timing calls", console=Console(stderr=True))
    ]
    if out is not None:
        results.write(out, "hub", rows)
    return rows


def measure(op: Op, case: Case, seconds: float) -> dict[str, Any]:
    """One shape; a backend is timed only after its result has passed."""
    given = case.arguments(Inputs(torch.bfloat16, "cuda"))
    x, weight, eps = given["input"], given["weight"], given["eps"]

    def eager(_: Any) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    ways: dict[str, Any] = {EAGER: eager}
    for backend in BACKENDS:
        ways[backend] = lambda _, backend=backend: op(x, weight, eps, backend=backend)
    wide = None if weight is None else weight.double()
    truth, plain = F.rms_norm(x.double(), x.shape[-1:], wide, eps), eager(None)
    for way in ways.values():
        as_good_as_eager(way(None), truth, plain)
    timed = {n: host_reading(Timed(way, [None]), QUEUED_US) for n, way in ways.items()}
    return {
        "op": op.name,
        "case": case.name,
        "preset": case.preset,
        "dtype": "bfloat16",
        "host_us": medians(timed, seconds),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="Host µs of a call")
    shown.add_column("case")
    for way in (EAGER, *BACKENDS):
        shown.add_column(way, justify="right")
    for row in rows:
        host = row["host_us"]
        shown.add_row(row["case"], *(f"{host[way]:.1f}" for way in (EAGER, *BACKENDS)))
    return shown
