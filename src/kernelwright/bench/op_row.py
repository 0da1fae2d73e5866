"""Measures one op at one case: times what is right, records why the rest is not timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import backends
from ..measure.timing import (
    CPU_READINGS,
    Replay,
    Timed,
    bytes_of,
    copying,
    host_reading,
    medians,
    rotation,
    wall_reading,
)
from ..ops.case import Case, Inputs
from ..ops.op import Composite, Op
from .correctness import Truth, Wrong, as_tuple, ran_a_kernel, same_bits
from .peers import PEERS, Peer, Way, eager, given

EXACT = "exact:"
COPY = "copy"
# a Composite without a named backend: it chooses by itself
AUTO = "auto"


def measure(
    op: Op | Composite,
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    peers: Sequence[Peer] = (),
    seconds: float = 0.1,
) -> dict[str, Any]:
    """One row: microseconds, bandwidth and error of each implementation of the case.

    `failed` names ours that were wrong or fell back to PyTorch; `not_covered` those that have no
    kernel for the case, and peers that refused it or were wrong. Neither is timed.
    """
    arguments = case.arguments(Inputs(dtype, str(device), 0))
    outputs = as_tuple(_run(given(op, eager(op)), arguments))
    moved = bytes_of([*arguments.values(), *outputs])
    row: dict[str, Any] = {
        "op": op.name,
        "case": case.name,
        "preset": case.preset,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "chosen": _chosen(op, arguments),
        "megabytes": moved / 1e6,
        "error": {},
        "not_covered": {},
        "failed": {},
    }
    ways = {**_ours(op, device, dtype, row["chosen"]), **_of_peers(op, arguments, peers, row)}
    right = _held(op, arguments, ways, row)
    sets = [
        case.arguments(Inputs(dtype, str(device), seed)) for seed in range(rotation(moved, device))
    ]
    timed = {name: Timed(way.call, [way.prepare(s) for s in sets]) for name, way in right.items()}
    _time(row, timed, copying(moved, device), seconds)
    return row | _derived(row, peers)


def _ours(
    op: Op | Composite, device: torch.device, dtype: torch.dtype, chosen: str
) -> dict[str, Way]:
    """Every backend of the op that can run here, and on a GPU every exact mode."""

    def bound(**how: Any) -> Way:
        if isinstance(op, Op):
            return given(op, lambda *a: op(*a, **how))
        return given(op, lambda **a: op.function(**a, **how))

    here = [b for b in op.backends if b == "torch" or not _problem(b, device, dtype)]
    if device.type == "cuda" and isinstance(op, Op):
        here.remove("torch")  # which is the peer "torch"
    ways = {b: bound(backend=b) for b in here}
    if chosen not in (AUTO, "torch"):
        ways.setdefault(chosen, bound(backend=chosen))
    if isinstance(op, Composite):
        return {AUTO: bound(), **{b: way for b, way in ways.items() if b != "torch"}}
    if "cuda" in here and device.type == "cuda":
        ways |= {f"{EXACT}{c}": bound(exact=c, backend="cuda") for c in op.exact}
    return ways


def _problem(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if backend not in ("triton", "cuda"):
        return None if device.type == "cuda" else "needs a CUDA GPU"
    return backends.problem(backend, device, dtype)


def _of_peers(
    op: Op | Composite, arguments: Mapping[str, Any], peers: Sequence[Peer], row: dict[str, Any]
) -> dict[str, Way]:
    found = {}
    for peer in peers:
        try:
            way = peer.way(op, arguments)
        except Exception as no:  # a peer may raise anything
            row["not_covered"][peer.column] = _first_line(no)
            continue
        if way is not None:
            found[peer.column] = way
    return found


def _chosen(op: Op | Composite, arguments: Mapping[str, Any]) -> str:
    if isinstance(op, Composite):
        return AUTO
    return op.choose(tuple(arguments[n] for n in op.arguments), None).backend


def _run(way: Way, arguments: Mapping[str, Any]) -> Any:
    return way.call(way.prepare(arguments))


def _held(
    op: Op | Composite, arguments: Mapping[str, Any], ways: dict[str, Way], row: dict[str, Any]
) -> dict[str, Way]:
    """The implementations that may be timed; the row records why the others may not."""
    try:
        truth = Truth(op, arguments, _run(given(op, eager(op)), arguments))
    except Wrong as wrong:
        row["failed"]["eager"] = str(wrong)
        return {}
    row["eager_error"] = truth.eager_error
    right = {}
    for name, way in ways.items():
        try:
            got = _run(way, arguments)
            if name.startswith(EXACT):
                chain = name.removeprefix(EXACT)
                same_bits(got, _run(given(op, op.exact[chain]), arguments), chain)
                row["error"][name] = truth.error(got)
            else:
                row["error"][name] = truth.hold(got)
            if _launches(op, name, row):
                ran_a_kernel(lambda way=way: _run(way, arguments))  # type: ignore[misc]
        except Exception as no:
            _write_down(row, name, no)
        else:
            right[name] = way
    _unforced(op, arguments, row, right)
    return right


def _launches(op: Op | Composite, name: str, row: dict[str, Any]) -> bool:
    """Whether this must run a kernel of ours; a Composite without CUDA kernels may use others."""
    if isinstance(op, Composite) and not {"triton", "cuda"} <= set(op.backends):
        return False
    ours = name in ("triton", "cuda") or name.startswith(EXACT)
    return ours or (name == AUTO and row["device"] == "cuda")


def _write_down(row: dict[str, Any], name: str, no: Exception) -> None:
    """Record why there is no time: a failure, unless it is a peer, or a kernel that declines the
    case without being the one chosen for it."""
    of_peer = name in (peer.column for peer in PEERS.values())
    refused = isinstance(no, ValueError) and name != row["chosen"]
    why = str(no) if isinstance(no, Wrong) else _first_line(no)
    row["not_covered" if of_peer or refused else "failed"][name] = why


def _unforced(
    op: Op | Composite, arguments: Mapping[str, Any], row: dict[str, Any], right: dict[str, Way]
) -> None:
    """A call that names no backend must run the kernel that `chosen` says it does."""
    if isinstance(op, Composite) or row["device"] != "cuda":
        return
    op.call(arguments)  # the first call plans the launch, which may compute
    try:
        ran_a_kernel(lambda: op.call(arguments))
    except Wrong as wrong:
        row["failed"][row["chosen"]] = str(wrong)
        right.pop(row["chosen"], None)


def _time(row: dict[str, Any], timed: dict[str, Timed], copy: Timed, seconds: float) -> None:
    """Put `gpu_us` and `host_us`, or on the CPU `wall_us`, and `copy_us` into the row."""
    row |= {"gpu_us": {}, "host_us": {}}
    if row["device"] != "cuda":
        walls = {name: wall_reading(t) for name, t in {COPY: copy, **timed}.items()}
        taken = medians(walls, seconds, CPU_READINGS)
        row |= {"copy_us": taken.pop(COPY), "wall_us": taken}
        return
    replays = {COPY: Replay(copy)}
    for name, t in timed.items():
        try:
            replays[name] = Replay(t)
        except Exception as no:
            _write_down(row, name, RuntimeError(f"no CUDA graph: {_first_line(no)}"))
    taken = medians(replays, seconds)
    row |= {"copy_us": taken.pop(COPY), "gpu_us": taken}
    hosts = {name: host_reading(timed[name], us) for name, us in taken.items()}
    row["host_us"] = medians(hosts, seconds)


def _derived(row: dict[str, Any], peers: Sequence[Peer]) -> dict[str, Any]:
    """GB/s and share of the copy's bandwidth of each; speed-up of the chosen one over peers."""
    times = row["gpu_us"] or row.get("wall_us", {})
    chosen = times.get(row["chosen"])
    columns = [peer.column for peer in peers if peer.column in times]
    return {
        "gb_s": {way: row["megabytes"] / us * 1e3 for way, us in times.items()},
        "of_copy": {way: row["copy_us"] / us for way, us in times.items()},
        "over": {c: times[c] / chosen for c in columns} if chosen else {},
    }


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
