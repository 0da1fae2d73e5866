"""Compares every exact mode with its eager chain: mismatching elements by width and row count.

Whole tensors are compared over seeds, scales and means: a wrong order of summation shows only in a
few of thousands of rows.
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..backends import Target, Unsupported
from ..backends.cuda import compile_cubin
from ..measure import results
from ..ops.case import Inputs
from ..ops.op import Call, Op, registry

WIDTHS = (64, 128, 1152, 1536, 2048, 2304, 3072, 4096, 5120)
# up to 16 rows, at::mean chooses its block by the number of rows
ROWS = (1, 2, 4, 8, 13, 16, 100, 4608, 200_000)
# the order does not depend on the dtype: fewer sizes for all but bfloat16
OTHER_ROWS = (1, 16, 4608)
# (seed, scale, mean) of the inputs
DRAWS = ((0, 1.0, 0.0), (1, 3.0, 0.5), (2, 0.02, 0.0))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def planned(op: Op, chain: str, rows: int, width: int, dtype: torch.dtype, target: Target) -> Any:
    """The launch for this size, planned on meta tensors."""
    given = op.sized(Inputs(dtype, "meta"), rows, width, chain)
    outs = op.allocate(*(given[n] for n in op.arguments))
    values = {**given, **dict(zip(op.outputs, outs, strict=True))}
    return op.kernels.cuda(Call(values, op=op.name, exact=chain, target=target))


def mismatches(op: Op, chain: str, rows: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """A row with the number of elements that differ from eager over all draws."""
    row = {
        "op": op.name,
        "chain": chain,
        "dtype": str(dtype).removeprefix("torch."),
        "width": width,
        "rows": rows,
    }
    differing = elements = 0
    draws = DRAWS[:1] if rows * width > 1 << 28 else DRAWS
    for seed, scale, mean in draws:
        given = op.sized(Inputs(dtype, "cuda", seed, scale, mean), rows, width, chain)
        args = [given[n] for n in op.arguments]
        want = op.exact[chain](*args)
        got = op(*args, exact=chain, backend="cuda")
        wants, gots = (v if isinstance(v, tuple) else (v,) for v in (want, got))
        for w, g in zip(wants, gots, strict=True):
            # NaN counts as equal to NaN
            differing += int(((w != g) & ~(w.isnan() & g.isnan())).sum())
            elements += w.numel()
        del given, args, want, got, wants, gots
    return {**row, "draws": len(draws), "elements": elements, "mismatches": differing}


def run(
    names: list[str], dtypes: list[torch.dtype], rows: list[int] | None
) -> list[dict[str, Any]]:
    target = Target.of(torch.device("cuda", torch.cuda.current_device()))
    wanted, uncovered, launches = [], [], {}
    for op in registry().values():
        if not isinstance(op, Op) or (names and op.name not in names):
            continue
        if "cuda" not in op.backends:  # its exact mode is the eager chain itself
            continue
        for chain, dtype, n, width in itertools.product(op.exact, dtypes, rows or ROWS, WIDTHS):
            if rows is None and dtype != torch.bfloat16 and n not in OTHER_ROWS:
                continue
            try:
                launch = planned(op, chain, n, width, dtype, target)
            except Unsupported as no:
                uncovered.append(
                    {
                        "op": op.name,
                        "chain": chain,
                        "dtype": str(dtype).removeprefix("torch."),
                        "width": width,
                        "rows": n,
                        "not_covered": str(no),
                    }
                )
                continue
            wanted.append((op, chain, n, width, dtype))
            launches[launch.code] = launch
    console = Console(stderr=True)
    console.print(f"{len(wanted)} sizes, {len(launches)} kernels")
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        arch = [target.arch] * len(launches)
        for _ in track(
            pool.map(compile_cubin, launches, arch, chunksize=8),
            "building",
            total=len(launches),
            console=console,
        ):
            pass
    done = [mismatches(*size) for size in track(wanted, "comparing", console=console)]
    return done + uncovered


def table(rows: list[dict[str, Any]]) -> Table:
    """Mismatching elements by op, chain and dtype over all widths and row counts."""
    shown = Table(title="exact modes against eager")
    for column in ("op", "chain", "dtype", "sizes", "elements", "mismatches", "where"):
        shown.add_column(column)
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["chain"], row["dtype"]), []).append(row)
    for key, group in sorted(groups.items()):
        covered = [r for r in group if "mismatches" in r]
        wrong = [f"{r['rows']}x{r['width']}:{r['mismatches']}" for r in covered if r["mismatches"]]
        missing = sorted({r["width"] for r in group if "not_covered" in r})
        note = " ".join(wrong[:6]) + (f" no kernel: {missing}" if missing else "")
        shown.add_row(
            *key,
            f"{len(covered)}/{len(group)}",
            f"{sum(r['elements'] for r in covered):.2e}",
            str(sum(r["mismatches"] for r in covered)),
            note,
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", help="names of ops; all by default")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--dtype", nargs="*", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--rows", nargs="*", type=int, help="row counts; 1 to 200,000 by default")
    args = parser.parse_args()
    rows = run(args.ops, [getattr(torch, d) for d in args.dtype], args.rows)
    if args.out is not None:
        results.write(args.out, "exact", rows)
    Console(width=150).print(table(rows))


if __name__ == "__main__":
    main()
