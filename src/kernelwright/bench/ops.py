"""Times ops at the shapes of real models: our backends, exact modes, and their peers.

A time is taken only after the result was compared with float64, and only of the kernel named.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from .. import place
from ..errors import BadSetting
from ..measure import results
from ..measure.results import environment_of
from .case_selection import choose_cases
from .op_row import measure
from .peers import ON_CPU, PEERS, Peer


def default_peers(device: str) -> tuple[str, ...]:
    return tuple(PEERS) if device == "cuda" else ON_CPU


def chosen_peers(names: Sequence[str] | None, device: torch.device) -> tuple[list[Peer], list[str]]:
    """The peers that can be measured here, and a line for each that cannot."""
    wanted = default_peers(device.type) if names is None else names
    for name in wanted:
        if name not in PEERS:
            raise BadSetting("--peers", f"no peer {name!r}, expected any of {', '.join(PEERS)}")
    missing = {name: PEERS[name].missing(device) for name in wanted}
    here = [PEERS[name] for name in wanted if missing[name] is None]
    return here, [line for line in missing.values() if line]


def run(
    names: Sequence[str] = (),
    *,
    presets: Sequence[str] = (),
    shapes: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    peers: Sequence[str] | None = None,
    device: str | None = None,
    seconds: float = 0.1,
    out: Path | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each op, case and dtype, and a line for each peer that is missing.

    All cases of models if neither `presets` nor `shapes` are given; on the CPU one small case of
    each op.
    """
    at = place.choose_device(device, tiny=True)
    kinds = [place.choose_dtype(d, at) for d in dtypes or (None,)]
    with_peers, missing = chosen_peers(peers, at)
    wanted = choose_cases(names, presets, shapes, small=at.type != "cuda")
    if out is not None:
        results.check_writable(out)
    rows: list[dict[str, Any]] = []
    every = [(op, case, d) for op, case in wanted for d in kinds]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if at.type == "cuda":
            stack.enter_context(torch.cuda.device(at))
        console = Console(stderr=True)
        for op, case, kind in track(every, "timing ops", console=console, transient=True):
            rows.append(measure(op, case, kind, at, with_peers, seconds))
            gc.collect()
            if at.type == "cuda":
                torch.cuda.empty_cache()  # frees the memory of this case's graphs
            if out is not None:
                _write(out, rows, with_peers, at)
    return rows, missing


def _write(out: Path, rows: list[dict[str, Any]], peers: list[Peer], at: torch.device) -> None:
    versions = {peer.name: peer.version for peer in peers}
    results.write(out, "ops", rows, environment=environment_of(at), peers=versions)


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each implementation of ours that was wrong or fell back to PyTorch."""
    return [
        f"{row['op']} {row['case']} {row['dtype']}, {way}: {why}"
        for row in rows
        for way, why in row["failed"].items()
    ]
