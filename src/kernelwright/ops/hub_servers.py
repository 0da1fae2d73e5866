"""Kernels from the Hugging Face Hub that run our ops; `kernelwright.hub.use` registers them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .selection import Choice


@dataclass(frozen=True)
class Server:
    """`run` takes the op's arguments and returns its result; `problem` returns why it cannot take
    them, or None; `name` is its repository, as reports print it."""

    name: str
    run: Callable[..., Any]
    problem: Callable[..., str | None]


_servers: dict[str, Server] = {}


def serve(op: str, server: Server | None) -> None:
    """Register a kernel for an op; None removes it."""
    if server is None:
        _servers.pop(op, None)
    else:
        _servers[op] = server


def server(op: str) -> Server | None:
    """The kernel that is registered for an op, or None."""
    return _servers.get(op)


def choose(op: str, args: tuple[Any, ...], exact: str | None, backend: str) -> Choice | None:
    """The kernel from the Hub, if one is registered and can take the call. backend="hub" uses it or
    raises."""
    if backend not in ("auto", "hub"):
        return None
    found = server(op)
    if found is None:
        no: str | None = "no kernel from the Hub serves this op (kernelwright.hub.use)"
    else:
        no = "exact modes are the cuda backend's" if exact else found.problem(*args)
        if no is None:
            return Choice("hub", f"served by {found.name}")
    if backend == "hub":
        raise ValueError(f"{op}: backend 'hub' cannot run this: {no}")
    return None
