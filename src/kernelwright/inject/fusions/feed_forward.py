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
from ...ops.linear import linear_gelu
from ...ops.linear.parts import linear_of_parts
from ..runtime.sites import declined, mode, site
from ..state.hooks import is_plain
from .base import CHANGES_DTYPE, BaseFusions, hooked_now, is_linear
from .compiled_ops import GELU_BESIDE, gelu_beside
from .projections import is_no_dropout, may_bypass, run_in_order, run_linear


class FeedForwardFusions(BaseFusions):
    def linear_gelu(self, linear: Any, gelu: Any, x: Tensor) -> Tensor:
        """gelu(linear(x)); `gelu` is a module of the model."""
        if not _is_gelu(gelu):
            return gelu(linear(x))
        return self._linear_gelu(linear, gelu, gelu.approximate == "tanh", x)

    def feed_forward(self, module: Any, x: Tensor) -> Tensor:
        """diffusers' FeedForward: a module of Linear and GELU, then the other layers."""
        first, *others = module.net
        if (y := self._fp8_feed_forward(module, x)) is not None:
            return y
        if hooked_now(first):
            declined("GELU", "a hook is on its activation")
            y = first(x)
        else:
            y = self._linear_gelu(first.proj, first.gelu, first.approximate == "tanh", x)
        return run_in_order(others, y)

    def joined_linear(self, last: Any, left: Tensor, linear: Any, gelu: Any, x: Tensor) -> Tensor:
        """last([left, gelu(linear(x))]) without a concatenation pass."""
        if not _is_gelu(gelu):
            return last(torch.cat([left, self.linear_gelu(linear, gelu, x)], dim=-1))
        if self._may_split_linear(last, left, linear, x):
            return self._split_linear(last, left, linear, gelu, x)
        y = run_linear(linear, x)
        if self.fp8_layers is not None and left.dtype == y.dtype:
            activation = "gelu_tanh" if gelu.approximate == "tanh" else "gelu"
            if (result := self.fp8_layers(last, y, activation, left=left)) is not None:
                return result

        def eager() -> Tensor:
            return torch.cat([left, gelu(y)], dim=-1)

        def kernel() -> Tensor:
            exact, backend = self._exact_and_backend(y, "torch")
            run = gelu_beside
            if torch.compiler.is_compiling():
                run, backend = GELU_BESIDE, backend or selection.traced()
            return run(left, y, gelu.approximate == "tanh", exact or "", backend or "")

        name = "GELU into joined rows"
        if why := _why_not_concatenate(left, y):
            declined(name, why)
            return last(eager())
        return run_linear(last, site(name, eager, kernel, left, y))

    def _may_split_linear(self, last: Any, left: Tensor, linear: Any, x: Tensor) -> bool:
        """Whether the last GEMM may be split in two along its input, in 16 bits."""
        if self.exact or not (is_linear(last) and is_linear(linear)):
            return False
        if torch.compiler.is_compiling() and not may_bypass((last, linear)):
            return False
        if self.fp8_layers is not None and self.fp8_layers.wanted(last):
            return False
        if torch.is_autocast_enabled(x.device.type):  # it does not cast for addmm_
            return False
        weights = [p for m in (last, linear) for p in m.parameters()]
        if _why_not_concatenate(left, x) is not None or _needs_grad(*weights):
            return False
        return torch.compiler.is_compiling() or self.at_hand(last, linear)

    def _split_linear(self, last: Any, left: Tensor, linear: Any, gelu: Any, x: Tensor) -> Tensor:
        """A GEMM for each part of the input: GELU stays in the epilogue of its own GEMM, and
        nothing is concatenated."""

        def kernel() -> Tensor:
            tanh = gelu.approximate == "tanh"
            rows = linear_gelu(x, linear.weight, linear.bias, approximate=tanh)
            return linear_of_parts([left, rows], last.weight, last.bias)

        def eager() -> Tensor:
            return last(torch.cat([left, gelu(linear(x))], dim=-1))

        return site("linear + GELU, last product in two", eager, kernel, left, x)

    def _linear_gelu(
        self, linear: Any, gelu: Callable[[Tensor], Tensor], tanh: bool, x: Tensor
    ) -> Tensor:
        """GELU in the epilogue of its GEMM where rounding may change, otherwise by itself."""
        plain = is_linear(linear)
        in_fp8 = self.fp8_layers is not None and self.fp8_layers.wanted(linear)
        if not self.exact and not in_fp8:
            if plain and (torch.compiler.is_compiling() or self.at_hand(linear)):
                return site(
                    "linear + GELU",
                    lambda: gelu(linear(x)),
                    lambda: linear_gelu(x, linear.weight, linear.bias, approximate=tanh),
                    x,
                )
            declined("linear + GELU", "an adapter or a hook is on its first Linear")
        y = run_linear(linear, x)
        if _needs_grad(y):
            declined("GELU", "gradients are recorded")
            return gelu(y)
        # in place: nobody else holds the result of a plain Linear, but a comparison reads it again
        own = plain and not torch.compiler.is_compiling() and not mode.comparing
        return site("GELU", lambda: gelu(y), lambda: self._gelu(y, tanh, y if own else None), y)

    def _gelu(self, y: Tensor, tanh: bool, out: Tensor | None) -> Tensor:
        exact, backend = self._exact_and_backend(y, "torch")
        return GELU(y, tanh, out=out, exact=exact, backend=backend)

    def _fp8_feed_forward(self, module: Any, x: Tensor) -> Tensor | None:
        """`feed_forward` in fp8, GELU in the quantising kernel; None where it stays in 16 bits."""
        if self.fp8_layers is None or not self.fp8_layers.wanted(module.net[0].proj):
            return None
        first, *between, last = module.net
        rows = first.proj(x)
        y = None
        if not hooked_now(first) and all(map(is_no_dropout, between)):
            y = self.fp8_layers(last, rows, "gelu_tanh" if first.approximate == "tanh" else "gelu")
        if y is None:
            y = run_in_order((*between, last), first.gelu(rows))
        return y

    def swiglu_linear(self, linear: Any, activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        """linear(SiLU(gate) * up)"""
        if self.fp8_layers is not None and not hooked_now(activation) and gate.shape == up.shape:
            y = self.fp8_layers(linear, gate, "silu", up)
            if y is not None:
                return y
        return run_linear(linear, self.swiglu(activation, gate, up))

    def swiglu(self, activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        """SiLU(gate) * up; `activation` is the model's SiLU."""

        def eager() -> Tensor:
            # as projections of their own give them: on a CPU, bits of SiLU may depend on strides
            return activation(gate.contiguous()) * up.contiguous()

        if hooked_now(activation):
            declined("SwiGLU", "a hook is on its activation")
            return eager()
        if gate.dtype != up.dtype or gate.shape != up.shape:
            declined("SwiGLU", "its two projections differ in dtype or shape")
            return eager()
        exact, backend = self._exact_and_backend(gate, "torch")
        return site(
            "SwiGLU", eager, lambda: SILU_MUL(gate, up, exact=exact, backend=backend), gate, up
        )

    def geglu(self, module: Any, x: Tensor) -> Tensor:
        """diffusers' GEGLU: first half of the projection * gelu(second half)."""
        packed = module.proj(x)

        def eager() -> Tensor:
            rows, gate = packed.chunk(2, dim=-1)
            return rows * F.gelu(gate)

        exact, backend = self._exact_and_backend(packed, "torch")
        return site(
            "GEGLU",
            eager,
            lambda: GEGLU(packed, False, "second", exact=exact, backend=backend),
            packed,
        )


def _is_gelu(activation: Any) -> bool:
    """PyTorch's own GELU, without a hook."""
    return is_plain(activation, nn.GELU) and not hooked_now(activation)


def _needs_grad(*tensors: Tensor) -> bool:
    """Whether autograd records operations on these; eager's GELU then has the better gradient."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _why_not_concatenate(left: Tensor, right: Tensor) -> str | None:
    """Why torch.cat must concatenate these rows, or None if a kernel may."""
    if _needs_grad(left, right):
        return "gradients are recorded"
    if left.dtype != right.dtype:
        return CHANGES_DTYPE
    if type(left) is not Tensor or type(right) is not Tensor:
        return "a tensor subclass"
    return None
