"""Times every op at the shapes of real models: triton, cuda, exact, eager and torch.compile.

A figure is taken only after the answer it belongs to was checked against float64.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ..ops.case import Case, Inputs
from ..ops.op import Op, registry
from . import results
from .timing import bytes_of, copy_us, gpu_us, host_us, rotation

# relative error that no right answer of these dtypes comes near
WRONG = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


def measure(op: Op, case: Case, dtype: torch.dtype, with_compile: bool = True) -> dict[str, Any]:
    """One row: microseconds of each way to compute the case, and how they compare."""
    device = torch.device("cuda")
    first = case.arguments(Inputs(dtype, "cuda", 0))
    args = [first[n] for n in op.arguments]
    outs = op.allocate(*args)
    moved = bytes_of([*args, *outs])
    sets = [
        [case.arguments(Inputs(dtype, "cuda", seed))[n] for n in op.arguments]
        for seed in range(rotation(moved, device))
    ]
    chain = "torch" if "torch" in op.exact else next(iter(op.exact))
    eager = op.exact[chain]
    ways: dict[str, Any] = {
        "eager": lambda a: eager(*a),
        "triton": lambda a: op(*a, backend="triton"),
        "cuda": lambda a: op(*a, backend="cuda"),
        **{f"exact:{c}": (lambda a, c=c: op(*a, exact=c, backend="cuda")) for c in op.exact},
    }
    if with_compile:
        torch._dynamo.reset()
        compiled = torch.compile(eager, fullgraph=True, dynamic=False)
        ways["compile"] = lambda a: compiled(*a)
    truth = op.reference(*(a.double() if isinstance(a, Tensor) else a for a in args))
    row: dict[str, Any] = {
        "op": op.name,
        "case": case.name,
        "preset": case.preset,
        "dtype": str(dtype).removeprefix("torch."),
        "chosen": op.choose(tuple(args), None).backend,
        "megabytes": round(moved / 1e6, 2),
        "copy_us": copy_us(moved, device),
        "gpu_us": {},
        "error": {},
    }
    for name, way in ways.items():
        try:
            got = way(args)
        except ValueError as no:  # an exact order that this signature has no kernel for
            row.setdefault("not_covered", {})[name] = str(no)
            continue
        error = relative_error(got, truth)
        row["error"][name] = error
        if not error < WRONG[dtype]:
            raise AssertionError(f"{op.name} {case.name} {name}: error {error:.2e} against float64")
        row["gpu_us"][name] = gpu_us(way, sets)
    row["host_us"] = host_us({n: functools.partial(ways[n], args) for n in row["gpu_us"]})
    return row


def relative_error(got: Any, truth: Any) -> float:
    gots, truths = (v if isinstance(v, tuple) else (v,) for v in (got, truth))
    return max(
        float((g.double() - t).norm() / t.norm().clamp_min(1e-300))
        for g, t in zip(gots, truths, strict=True)
    )


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="GPU µs (graph, rotated buffers); host µs in brackets")
    for column in ("op", "case", "MB", "copy", "triton", "cuda", "exact", "eager", "compile"):
        shown.add_column(column, justify="left" if column in ("op", "case") else "right")
    for row in rows:
        gpu, host = row["gpu_us"], row["host_us"]
        cell = {n: f"{gpu[n]:.1f} ({host[n]:.0f})" for n in gpu}
        exact = [f"{gpu[n]:.1f}" for n in gpu if n.startswith("exact:")]
        shown.add_row(
            row["op"],
            row["case"],
            f"{row['megabytes']:.0f}",
            f"{row['copy_us']:.1f}",
            cell.get("triton", ""),
            cell.get("cuda", ""),
            " ".join(exact),
            cell.get("eager", ""),
            cell.get("compile", ""),
        )
    return shown


def run(
    names: list[str],
    presets: list[str],
    dtype: torch.dtype,
    out: Path | None,
    with_compile: bool,
) -> list[dict[str, Any]]:
    chosen = [
        (op, case)
        for op in registry().values()
        if isinstance(op, Op) and (not names or op.name in names)
        for case in op.cases
        if case.large and (not presets or case.preset in presets)
    ]
    rows = []
    for op, case in track(chosen, "timing ops", console=Console(stderr=True)):
        rows.append(measure(op, case, dtype, with_compile))
        if out is not None:
            results.write(out, "ops", rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", help="names of ops; all by default")
    parser.add_argument("--preset", nargs="*", default=[], help="shapes of these models only")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    args = parser.parse_args()
    rows = run(args.ops, args.preset, getattr(torch, args.dtype), args.out, not args.no_compile)
    Console(width=150).print(table(rows))


if __name__ == "__main__":
    main()
