"""Ops of ours that a kernel on the Hub serves, once it has shown that it computes the same.

`use` loads a kernel, runs it beside our reference on the op's own cases, and lets it serve the op
where it is as close to float64 as eager PyTorch is. What it cannot take, the op runs as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..checking.numerics import hold_case
from ..ops import served
from ..ops.attention import forget as forget_attention
from ..ops.attention import request_of
from ..ops.case import Case
from ..ops.op import Composite, Op, registry
from ..ops.served import Server
from .adapters import ADAPTERS, Adapter
from .layer_mapping import require

DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Use:
    """What came of `use`: the ops that are served now, and why others are not."""

    kernel: str
    serves: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "serves": self.serves, "refused": dict(self.refused)}

    def __str__(self) -> str:
        lines = [f"{self.kernel} serves {', '.join(self.serves) or 'nothing'}"]
        return "\n".join(lines + [f"  {op}: {why}" for op, why in self.refused.items()])


def use(
    repo_id: str,
    *,
    version: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: str | None = None,
) -> Use:
    """Let a kernel on the Hub serve our ops: kernels-community/activation, .../flash-attn3, ...

    Calls with backend None then go to it where it can take them, and with backend="hub" to nothing
    else. A kernel that cannot be had, offline for one, changes nothing: the reason is in `refused`.
    """
    if repo_id not in ADAPTERS:
        known = ", ".join(sorted(ADAPTERS))
        raise ValueError(f"{repo_id}: no op of ours knows this kernel; those known are {known}")
    name = f"{repo_id}@{revision or f'v{version}'}"
    adapters = ADAPTERS[repo_id]
    try:
        require()
        from kernels import get_kernel

        kernel = get_kernel(
            repo_id, version=version, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # no network, no build for this torch, not trusted, it fails itself
        reason = _unavailable(error)
        return Use(name, refused={a.op: f"{reason}; the op keeps its own" for a in adapters})
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    serves, refused = [], {}
    for adapter in adapters:
        why = serve(adapter, kernel, name, place)
        if why is None:
            serves.append(adapter.op)
        else:
            refused[adapter.op] = why
    return Use(name, tuple(serves), refused)


def release(*ops: str) -> None:
    """Let these ops, or all, run their own kernels again."""
    for name in ops or tuple(registry()):
        served.serve(name, None)
        _forget(name)


def serve(adapter: Adapter, kernel: Any, name: str, device: str) -> str | None:
    """Hold a kernel to our bar and let it serve an op; returns why not, or None."""
    function = getattr(kernel, adapter.function, None)
    if function is None:
        return f"the kernel has no {adapter.function}"
    op = registry()[adapter.op]

    def run(*args: Any) -> Any:
        return adapter.call(function, *args)

    try:
        held = sum(_held(op, case, dtype, run, adapter, device) for case, dtype in _trials(op))
    except AssertionError as error:
        return f"further from float64 than eager PyTorch: {error}"
    except Exception as error:
        return f"it fails on {device}: {type(error).__name__}: {error}"
    if not held:
        return f"it takes none of the op's cases on {device}"
    served.serve(adapter.op, Server(name, run, adapter.problem))
    _forget(adapter.op)
    return None


def _unavailable(error: Exception) -> str:
    """Why a kernel could not be had, in one line."""
    cause: BaseException | None = error
    while cause is not None:
        kinds = {kind.__name__ for kind in type(cause).__mro__}
        if kinds & {"NetworkError", "ConnectionError", "OfflineModeIsEnabled", "TimeoutException"}:
            return "offline: the Hub cannot be reached"
        cause = cause.__cause__ or cause.__context__
    return f"not available ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _trials(op: Op | Composite) -> list[tuple[Case, torch.dtype]]:
    return [(case, dtype) for case in op.cases if not case.large for dtype in DTYPES]


def _held(
    op: Op | Composite,
    case: Case,
    dtype: torch.dtype,
    run: Callable[..., Any],
    adapter: Adapter,
    device: str,
) -> bool:
    """Hold one case to the bar, if the kernel takes it."""
    taken = False

    def call(arguments: dict[str, Any]) -> Any:
        nonlocal taken
        args = _positional(op, arguments)
        taken = adapter.problem(*_asked(op, args)) is None
        return run(*args) if taken else op.call(arguments, backend="torch")

    hold_case(op, case, dtype, call, device)
    return taken


def _positional(op: Op | Composite, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    if isinstance(op, Op):
        return tuple(arguments[n] for n in op.arguments)
    names = ("query", "key", "value", "mask", "scale", "causal")
    return tuple(arguments.get(n, False if n == "causal" else None) for n in names)


def _asked(op: Op | Composite, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `problem` of a server is asked with: attention has described its call already."""
    if isinstance(op, Op):
        return args
    query, key, value, mask, _, causal = args
    return (request_of(query, key, value, mask, causal),)


def _forget(name: str) -> None:
    op = registry()[name]
    if isinstance(op, Op):
        op.forget()
    elif name == "attention":
        forget_attention()
