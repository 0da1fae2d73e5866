"""Linear layers and the activations between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops import selection
from ...ops.gelu import GELU
from ...ops.glu import GEGLU, SILU_MUL
from ...ops.linear import algorithms, linear_gelu
from ..runtime.sites import current, declined, site
from ..state.hooks import is_plain
from .base import CHANGES_DTYPE, Places, hooked_now, is_linear
from .compiled_ops import GELU_BESIDE, gelu_beside
from .projections import in_turn, may_go_around, product


class FeedForwardPlaces(Places):
    def linear_gelu(self, linear: Any, gelu: Any, x: Tensor) -> Tensor:
        """gelu(linear(x)); `gelu` is a module of the model."""
        if not _is_gelu(gelu):
            return gelu(linear(x))
        return self._linear_gelu(linear, gelu, gelu.approximate == "tanh", x)

    def feed_forward(self, module: Any, x: Tensor) -> Tensor:
        """diffusers' FeedForward: Linear and GELU in one module, then the other layers."""
        first, *others = module.net
        if (y := self._fp8_feed_forward(module, x)) is not None:
            return y
        if hooked_now(first):
            declined("GELU", "a hook wants to see the activation being called")
            y = first(x)
        else:
            y = self._linear_gelu(first.proj, first.gelu, first.approximate == "tanh", x)
        return in_turn(others, y)

    def joined_linear(self, last: Any, left: Tensor, linear: Any, gelu: Any, x: Tensor) -> Tensor:
        """last([left, gelu(linear(x))]), without a pass that joins the rows."""
        if not _is_gelu(gelu):
            return last(torch.cat([left, self.linear_gelu(linear, gelu, x)], dim=-1))
        if self._may_split(last, left, linear, x):
            return self._split_linear(last, left, linear, gelu, x)
        y = product(linear, x)
        if self.fp8_layers is not None and left.dtype == y.dtype:
            activation = "gelu_tanh" if gelu.approximate == "tanh" else "gelu"
            if (result := self.fp8_layers(last, y, activation, left=left)) is not None:
                return result

        def eager() -> Tensor:
            return torch.cat([left, gelu(y)], dim=-1)

        def kernel() -> Tensor:
            exact, backend = self._how(y, "torch")
            join = gelu_beside
            if torch.compiler.is_compiling():
                join, backend = GELU_BESIDE, backend or selection.traced()
            return join(left, y, gelu.approximate == "tanh", exact or "", backend or "")

        name = "GELU into joined rows"
        if why := _kept_apart(left, y):
            declined(name, why)
            return last(eager())
        return product(last, site(name, eager, kernel, left, y))

    def _may_split(self, last: Any, left: Tensor, linear: Any, x: Tensor) -> bool:
        """Whether the last product may be the sum of two, in 16 bits."""
        if self.exact or not (is_linear(last) and is_linear(linear)):
            return False
        if torch.compiler.is_compiling() and not may_go_around((last, linear)):
            return False
        if self.fp8_layers is not None and self.fp8_layers.wanted(last):
            return False
        if torch.is_autocast_enabled(x.device.type):  # which leaves an addition in place alone
            return False
        weights = [p for m in (last, linear) for p in m.parameters()]
        return _kept_apart(left, x) is None and not _recording(*weights)

    def _split_linear(self, last: Any, left: Tensor, linear: Any, gelu: Any, x: Tensor) -> Tensor:
        """The product of either part by itself, the second added to the first: GELU stays in the
        epilogue of its own product, and nothing is joined. 1142 against 1205 us at 4608 rows of
        3072 and 12288 on H200."""

        def kernel() -> Tensor:
            width = left.shape[-1]
            y = algorithms.linear(left, last.weight[:, :width], last.bias)
            tanh = gelu.approximate == "tanh"
            rows = linear_gelu(x, linear.weight, linear.bias, approximate=tanh)
            y.flatten(0, -2).addmm_(rows.flatten(0, -2), last.weight[:, width:].t())
            return y

        def eager() -> Tensor:
            return last(torch.cat([left, gelu(linear(x))], dim=-1))

        return site("linear + GELU, last product in two", eager, kernel, left, x)

    def _linear_gelu(
        self, linear: Any, gelu: Callable[[Tensor], Tensor], tanh: bool, x: Tensor
    ) -> Tensor:
        """GELU in the epilogue of the product where rounding may change, otherwise by itself."""
        plain = is_linear(linear)
        in_fp8 = self.fp8_layers is not None and self.fp8_layers.wanted(linear)
        if not self.exact and not in_fp8:
            if plain:
                return site(
                    "linear + GELU",
                    lambda: gelu(linear(x)),
                    lambda: linear_gelu(x, linear.weight, linear.bias, approximate=tanh),
                    x,
                )
            declined("linear + GELU", "an adapter or a hook is on its first Linear")
        y = product(linear, x)
        if _recording(y):
            declined("GELU", "gradients are recorded")
            return gelu(y)
        # nobody else holds what a plain Linear returns, but eager needs it to compare with
        own = plain and not torch.compiler.is_compiling() and not current.comparing
        return site("GELU", lambda: gelu(y), lambda: self._gelu(y, tanh, y if own else None), y)

    def _gelu(self, y: Tensor, tanh: bool, out: Tensor | None) -> Tensor:
        exact, backend = self._how(y, "torch")
        return GELU(y, tanh, out=out, exact=exact, backend=backend)

    def _fp8_feed_forward(self, module: Any, x: Tensor) -> Tensor | None:
        """The same in eight bits: GELU together with the step to them."""
        if self.fp8_layers is None or not self.fp8_layers.wanted(module.net[0].proj):
            return None
        first, *between, last = module.net
        rows = first.proj(x)
        y = None
        if not hooked_now(first) and _pass_through(between):
            y = self.fp8_layers(last, rows, "gelu_tanh" if first.approximate == "tanh" else "gelu")
        if y is None:
            y = in_turn((*between, last), first.gelu(rows))
        return y

    def swiglu_linear(self, linear: Any, activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        """linear(SiLU(gate) * up)"""
        if self.fp8_layers is not None and not hooked_now(activation) and gate.shape == up.shape:
            y = self.fp8_layers(linear, gate, "silu", up)
            if y is not None:
                return y
        return product(linear, self.swiglu(activation, gate, up))

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
        return site(
            "SwiGLU", eager, lambda: SILU_MUL(gate, up, exact=exact, backend=backend), gate, up
        )

    def geglu(self, module: Any, x: Tensor) -> Tensor:
        """diffusers' GEGLU: the second half of a projection activated, times the first."""
        packed = module.proj(x)

        def eager() -> Tensor:
            rows, gate = packed.chunk(2, dim=-1)
            return rows * F.gelu(gate)

        exact, backend = self._how(packed, "torch")
        return site(
            "GEGLU",
            eager,
            lambda: GEGLU(packed, False, "second", exact=exact, backend=backend),
            packed,
        )


def _is_gelu(activation: Any) -> bool:
    """PyTorch's GELU, and nobody wants to see it being called."""
    return is_plain(activation, nn.GELU) and not hooked_now(activation)


def _recording(*tensors: Tensor) -> bool:
    """Whether autograd records what is done to these; eager's GELU has the better gradient."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _kept_apart(left: Tensor, right: Tensor) -> str | None:
    """Why PyTorch is to join these rows, or None if a kernel may."""
    if _recording(left, right):
        return "gradients are recorded"
    if left.dtype != right.dtype:
        return CHANGES_DTYPE
    if type(left) is not Tensor or type(right) is not Tensor:
        return "tensors of a class of their own"
    return None


def _pass_through(layers: list[Any]) -> bool:
    """Whether these layers hand on what they are given."""
    return all(
        is_plain(m, nn.Dropout) and not hooked_now(m) and not (m.training and m.p) for m in layers
    )
