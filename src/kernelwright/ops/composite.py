"""A public function made of other ops, or of PyTorch's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .case import Case
from .declared_ops import declared
from .selection import Choice

# selects a part of the call from its arguments, or from its result as {"out": result}
Part = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(eq=False)
class Composite:
    """Listed, tested and timed like an op, with no kernel or torch.library entry of its own.

    `forget` clears cached choices; `describe` turns the arguments into what `problem` of a Hub
    server takes, None for the arguments themselves; `part` selects the part of a large call that is
    compared in float64; `category` is its row in profiles, if its name does not say it.
    """

    name: str
    formula: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    cases: Sequence[Case]
    chooser: Callable[[torch.device, torch.dtype], Choice]
    exact: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    backends: tuple[str, ...] = ("torch",)
    forget: Callable[[], None] = lambda: None
    describe: Callable[..., Any] | None = None
    part: Callable[[Mapping[str, Any]], Part] = lambda arguments: dict
    category: str | None = None

    def __post_init__(self) -> None:
        declared[self.name] = self

    def choose_for(
        self, device: torch.device, dtype: torch.dtype, exact: str | None = None
    ) -> Choice:
        """What runs for tensors of this device and dtype, and why."""
        if exact:
            return Choice("torch", "PyTorch's own kernels")
        return self.chooser(device, dtype)

    def call(self, arguments: Mapping[str, Any], **how: Any) -> Any:
        return self.function(**arguments, **how)
