"""The kernel of gated linear units: which arguments of an op it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .call import GluCall

if TYPE_CHECKING:
    from ...backends import Launch
    from ..plan import Call


@dataclass(frozen=True)
class GluKernel:
    """act(a) * b; `activation` is "gelu" or "silu". `a` and `b` name two arguments; if they name
    the same one, its halves, and the argument `gate` says which half is activated."""

    activation: str
    a: str = "input"
    b: str = "input"

    def triton(self, call: Call) -> Launch:
        from .triton import plan

        return plan(self.bind(call), call)

    def cuda(self, call: Call) -> Launch:
        from .cuda import plan

        return plan(self.bind(call), call)

    def bind(self, call: Call) -> GluCall:
        function = self.activation
        if function == "gelu":
            function = "gelu_tanh" if call["approximate"] else "gelu_erf"
        offsets = (0, 0)
        if self.a == self.b:
            half = call["out"].shape[-1]
            offsets = (0, half) if call["gate"] == "first" else (half, 0)
        return GluCall((self.a, self.b, "out"), offsets, function)
