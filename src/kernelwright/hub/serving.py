"""Lets a kernel of the Hub run our ops, after it has passed their accuracy check.

`use` loads a kernel and runs it on the op's own cases. If it is as close to float64 as eager
PyTorch is, it serves the op from then on; calls that it cannot take run as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..checking.numerics import hold_case
from ..ops import hub_servers
from ..ops.case import Case
from ..ops.hub_servers import Server
from ..ops.op import Composite, Op, registry
from .adapters import ADAPTERS, Adapter
from .layer_mapping import require

DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Use:
    """The result of `use`: the ops that are served now, and why the others are not."""

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
    trust_remote_code: bool | list[str] = False,
    device: str | None = None,
) -> Use:
    """Let a kernel on the Hub serve our ops: kernels-community/activation, .../flash-attn3, ...

    Calls with backend None then go to it where it can take them, and with backend="hub" to nothing
    else. A kernel that cannot be loaded changes nothing: the reason is in `refused`. A publisher
    that the Hub does not list as trusted needs `trust_remote_code`, True or a list of repositories.
    """
    if repo_id not in ADAPTERS:
        known = ", ".join(sorted(ADAPTERS))
        raise ValueError(f"{repo_id}: no adapter for this kernel; there are adapters for {known}")
    name = f"{repo_id}@{revision or f'v{version}'}"
    adapters = ADAPTERS[repo_id]
    try:
        require()
        from kernels import get_kernel, has_kernel

        which = {"version": version, "revision": revision, "trust_remote_code": trust_remote_code}
        if not has_kernel(repo_id, **which):
            raise FileNotFoundError(f"no build for torch {torch.__version__} on this machine")
        kernel = get_kernel(repo_id, **which)
    except Exception as error:  # no network, no build for this torch, not trusted, its own
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
    """Have these ops, or all, run their own kernels again."""
    for name in ops or tuple(registry()):
        hub_servers.serve(name, None)
        registry()[name].forget()


def serve(adapter: Adapter, kernel: Any, name: str, device: str) -> str | None:
    """Check a kernel and let it serve an op; returns why it does not, or None."""
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
    hub_servers.serve(adapter.op, Server(name, run, adapter.problem))
    op.forget()
    return None


def _unavailable(error: Exception) -> str:
    """Why a kernel could not be loaded, in one line."""
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
    """Check one case, if the kernel takes it; returns whether it does."""
    taken = False

    def call(arguments: dict[str, Any]) -> Any:
        nonlocal taken
        args = _positional(op, arguments)
        taken = adapter.problem(*_asked(op, args)) is None
        return run(*args) if taken else op.call(arguments, backend="torch")

    hold_case(op, case, dtype, call, device)
    return taken


def _positional(op: Op | Composite, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """The op's arguments in order, defaults filled in."""
    if isinstance(op, Op):
        return tuple(arguments[n] for n in op.arguments)
    bound = inspect.signature(op.function).bind(**arguments)
    bound.apply_defaults()
    return bound.args


def _asked(op: Op | Composite, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a server's `problem`: the op's own, or its description of the call."""
    if isinstance(op, Op) or op.describe is None:
        return args
    return (op.describe(*args),)
