"""Linear layers and the activations between them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.glu import GEGLU, SILU_MUL
from ...ops.linear import linear_gelu
from ..check import declined, site
from .places import Places, hooked_now, is_linear


class FeedForwardPlaces(Places):
    def linear_gelu(self, linear: Any, gelu: Any, x: Tensor) -> Tensor:
        """gelu(linear(x)), with GELU in the epilogue of the product where rounding may change."""

        def eager() -> Tensor:
            return gelu(linear(x))

        plain = type(gelu) is nn.GELU and not hooked_now(gelu) and is_linear(linear)
        eight_bits = self.eight_bits is not None and self.eight_bits.wanted(linear)
        if self.exact or eight_bits or not plain:
            return eager()
        return site(
            "linear + GELU",
            eager,
            lambda: linear_gelu(
                x, linear.weight, linear.bias, approximate=gelu.approximate == "tanh"
            ),
        )

    def feed_forward(self, module: Any, x: Tensor) -> Tensor:
        """diffusers' FeedForward, with GELU in the epilogue of its first product."""

        def eager() -> Tensor:
            return type(module).forward(module, x)

        first = module.net[0]
        if (y := self._eight_bit_feed_forward(module, x)) is not None:
            return y
        if hooked_now(first) or not is_linear(first.proj):
            declined("linear + GELU", "an adapter or a hook is on its first Linear")
            return eager()

        def kernel() -> Tensor:
            y = linear_gelu(
                x, first.proj.weight, first.proj.bias, approximate=first.approximate == "tanh"
            )
            for layer in list(module.net)[1:]:
                y = layer(y)
            return y

        return site("linear + GELU", eager, kernel)

    def _eight_bit_feed_forward(self, module: Any, x: Tensor) -> Tensor | None:
        """The same in eight bits: GELU together with the step to them."""
        if self.eight_bits is None or not self.eight_bits.wanted(module.net[0].proj):
            return None
        first, *between, last = module.net
        rows = first.proj(x)
        y = None
        if not hooked_now(first) and _pass_through(between):
            y = self.eight_bits(last, rows, "gelu_tanh" if first.approximate == "tanh" else "gelu")
        if y is None:
            y = first.gelu(rows)
            for layer in (*between, last):
                y = layer(y)
        return y

    def swiglu_linear(self, linear: Any, activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        """linear(SiLU(gate) * up)"""
        if self.eight_bits is not None and not hooked_now(activation) and gate.shape == up.shape:
            y = self.eight_bits(linear, gate, "silu", up)
            if y is not None:
                return y
        return linear(self.swiglu(activation, gate, up))

    def swiglu(self, activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        """SiLU(gate) * up; `activation` is the model's SiLU."""

        def eager() -> Tensor:
            return activation(gate) * up

        if hooked_now(activation):
            declined("SwiGLU", "a hook wants to see the activation being called")
            return eager()
        if gate.dtype != up.dtype or gate.shape != up.shape:
            declined("SwiGLU", "its two projections are not alike")
            return eager()
        exact, backend = self._how(gate, "torch")
        return site("SwiGLU", eager, lambda: SILU_MUL(gate, up, exact=exact, backend=backend))

    def geglu(self, module: Any, x: Tensor) -> Tensor:
        """diffusers' GEGLU: the second half of a projection activated, times the first."""
        packed = module.proj(x)

        def eager() -> Tensor:
            rows, gate = packed.chunk(2, dim=-1)
            return rows * F.gelu(gate)

        exact, backend = self._how(packed, "torch")
        return site(
            "GEGLU", eager, lambda: GEGLU(packed, False, "second", exact=exact, backend=backend)
        )


def _pass_through(layers: list[Any]) -> bool:
    """Whether these layers hand on what they are given."""
    return all(type(m) is nn.Dropout and not (m.training and m.p) for m in layers)
