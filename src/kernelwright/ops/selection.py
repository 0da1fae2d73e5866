"""Which backend runs a call: asked for by name, set for a block of code, or chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from .. import backends
from ..backends.torch_internals import mark_constant
from ..backends.user_warnings import warn
from . import checks

BACKENDS = ("auto", "torch", "triton", "cuda", "aot", "hub")

current: ContextVar[str] = ContextVar("kernelwright_backend", default="auto")
# Dynamo cannot trace a ContextVar. A `use_backend` inside the traced function is on this stack
# during tracing; outside of it, the graph reads `current` each time it runs
_traced: list[str] = []
SURROUNDING = ""


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Run every op in the block on one backend: "auto", "torch", "triton", "cuda", "aot" or "hub".

    >>> with use_backend("torch"):
    ...     y = rmsnorm(torch.ones(1, 2))
    """
    checks.choice("use_backend", "backend", backend, BACKENDS)
    if torch.compiler.is_compiling():
        _traced.append(backend)
        try:
            yield
        finally:
            _traced.pop()
        return
    token = current.set(backend)
    try:
        yield
    finally:
        current.reset(token)


def traced() -> str:
    """The backend of the innermost traced `use_backend`; SURROUNDING means: ask at run time."""
    return _traced[-1] if _traced else SURROUNDING


def surrounding() -> str:
    """The backend of the innermost `use_backend`; a graph keeps the one it was traced under."""
    if torch.compiler.is_compiling():
        return traced() or _around_the_graph()
    return current.get()


@mark_constant
def _around_the_graph() -> str:
    return current.get()


@dataclass(frozen=True)
class Choice:
    """A backend and the reason it was chosen, as `kernelwright doctor` prints it."""

    backend: str
    reason: str


def choose(
    op: str,
    prefer: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype,
    exact: str | None,
    backend: str,
) -> Choice:
    """The backend for tensors of this device and dtype, and why. A named backend is used or raises;
    it is never replaced."""
    if backend == "torch":
        return Choice("torch", "asked for by name")
    if backend != "auto":
        problem = _problem(backend, device, dtype, exact)
        if problem:
            raise ValueError(f"{op}: backend {backend!r}: {problem}")
        return Choice(backend, "asked for by name")
    if device.type != "cuda":
        return Choice("torch", f"tensors on {device.type}: plain PyTorch")
    problems: list[str] = []
    for name in ("cuda", "aot") if exact else prefer:
        problem = _problem(name, device, dtype, exact)
        if problem is None:
            why = "keeps the bits of eager" if exact else "fastest measured for this op"
            return Choice(name, why if not problems else "; ".join(problems))
        problems.append(f"{name}: {problem}")
    reason = "; ".join(problems)
    if dtype != torch.float64:
        warn(f"{op}: running plain PyTorch ({reason})")
    return Choice("torch", reason)


def _problem(
    backend: str, device: torch.device, dtype: torch.dtype, exact: str | None
) -> str | None:
    if dtype == torch.float64:
        return "float64 runs in plain PyTorch"
    if exact and backend == "triton":
        return "Triton cannot fix the order of a sum; exact modes need the cuda backend"
    return backends.problem(backend, device, dtype)
