"""Ops that a kernel from elsewhere serves. `kernelwright.hub.use` puts such kernels here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .selection import Choice


@dataclass(frozen=True)
class Server:
    """`run` takes the op's arguments and returns its result; `problem` says why it cannot take
    them, or None; `name` is where it comes from, as reports print it."""

    name: str
    run: Callable[..., Any]
    problem: Callable[..., str | None]


_servers: dict[str, Server] = {}


def serve(op: str, server: Server | None) -> None:
    """Let a kernel serve an op, or with None let go of the one that does."""
    if server is None:
        _servers.pop(op, None)
    else:
        _servers[op] = server


def server(op: str) -> Server | None:
    """The kernel that serves an op, if there is one."""
    return _servers.get(op)


def choose(op: str, args: tuple[Any, ...], exact: str | None, backend: str) -> Choice | None:
    """The kernel from the Hub, where one serves the op and can take the call. Asked for by name,
    it is taken or refused."""
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
