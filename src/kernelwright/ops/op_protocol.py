"""What the files below `op.py` need of an op. They are typed against this, so none imports `Op`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor


class DeclaredOp(Protocol):
    """An op as planning, code generation and registration see it; see `Op` for the meanings."""

    name: str
    schema: str
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    inplace: tuple[str, ...]
    writes: tuple[str, ...]
    exact: Mapping[str, Callable[..., Any]]
    kernels: Any
    backward: Any
    run: Callable[..., Any]
    library_op: Callable[..., Any]
    unrecorded_op: Callable[..., Any]
    _plans: Any

    @property
    def reference(self) -> Callable[..., Any]: ...
    @property
    def allocate(self) -> Callable[..., tuple[Tensor, ...]]: ...

    def slow_call(
        self, args: tuple[Any, ...], out: Any, exact: str | None, backend: str | None, inplace: bool
    ) -> Any: ...

    def compute(
        self, args: tuple[Any, ...], out: Any, exact: str | None, backend: str, inplace: bool
    ) -> Any: ...

    def in_steps(self, args: tuple[Any, ...], exact: str | None, backend: str) -> Any: ...

    def launch_plan(
        self, args: tuple[Any, ...], out: Any, how: Any, alignment: int = 16
    ) -> Callable[[tuple[Any, ...], Any], Any]: ...

    def validate(
        self,
        args: tuple[Any, ...],
        out: Any = None,
        exact: str | None = None,
        backend: str = "auto",
        inplace: bool = False,
    ) -> tuple[Tensor | None, ...] | None: ...
