"""Norms, alone and together with the additions and the modulation around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import fp8, selection
from ...ops.adaln import ADALN_LAYERNORM, ADALN_RMSNORM
from ...ops.fp8.rows import NORM_QUANTIZE, RESIDUAL_NORM_QUANTIZE, RESIDUAL_QUANTIZE
from ...ops.layernorm import LAYERNORM
from ...ops.residual import GATED_RESIDUAL, GATED_RESIDUAL_NORM
from ...ops.rmsnorm import RMSNORM
from ..fp8.activations import Makers
from ..runtime.sites import declined, site
from .base import CHANGES_DTYPE, Part, modulated
from .channel_norms import ChannelPlaces
from .compiled_ops import JOINT_NORM, JOINT_RESIDUAL

# such rows at::mean sums in another order; and eager keeps their layout, which the convolutions of
# a VAE want: LTX-Video's decoded 49 frames in 69 ms so, and in 98 with rows made contiguous (H200)
STRIDED = "its rows do not lie side by side in memory"
AT_MEAN = ("diffusers", "transformers")
ROUNDS_BETWEEN = "no kernel rounds between a norm in float32 and what stands beside it"


class NormPlaces(ChannelPlaces):
    def norm(self, module: Any, x: Tensor) -> Tensor:
        """A norm by itself: what its module's forward does."""

        def eager() -> Tensor:
            return type(module).forward(module, x)

        read = self._read("norm", module, x, bare=False)
        if read is None:
            return eager()
        norm, weight, bias, eps = read
        if norm.chain in AT_MEAN and x.shape[-1] > 1 and x.stride(-1) != 1:
            if x.ndim < 3 or self._not_by_channel(norm, x.movedim(-1, 1)):
                declined("norm", STRIDED)
                return eager()
            channels = x.movedim(-1, 1)
            return site(
                "norm", eager, lambda: self._by_channel(channels, weight, eps).movedim(1, -1), x
            )
        exact, backend = self._how(x, norm.chain)

        def kernel() -> Tensor:
            if norm.kind == "rms":
                return RMSNORM(x, weight, eps, exact=exact, backend=backend)
            return LAYERNORM(x, weight, bias, eps, exact=exact, backend=backend)

        return site("norm", eager, kernel, x)

    def norm_modulate(
        self, module: Any, x: Tensor, scale: Part, shift: Part, wide: bool = False
    ) -> Tensor:
        """norm(x) * (1 + scale) + shift; `wide` has all of it in float32, rounded once (Wan)."""

        def eager() -> Tensor:
            y = modulated(module(x.float() if wide else x), scale, shift)
            return y.type_as(x) if wide else y

        name = "norm + modulate"
        read = self._read(name, module, x, scale, shift, wide=wide)
        if read is None:
            return eager()
        norm, weight, bias, eps = read
        rms = norm.kind == "rms"
        if rms and (norm.chain not in ("torch", "diffusers") or wide):
            declined(name, f"no kernel modulates the RMSNorm of {norm.chain}")
            return eager()
        if self.exact and norm.chain == "wan" and not wide:
            declined(name, ROUNDS_BETWEEN)
            return eager()
        exact, backend = self._how(x, norm.chain if rms else "wan" if wide else "diffusers")

        def kernel() -> Tensor:
            if (makers := self._makers(x)) is not None:
                parts = weight, bias, scale, shift, norm.kind, eps
                return makers(module, NORM_QUANTIZE, x, *parts, backend=backend)
            if rms:
                return ADALN_RMSNORM(x, weight, scale, shift, eps, exact=exact, backend=backend)
            return ADALN_LAYERNORM(x, weight, scale, shift, bias, eps, exact=exact, backend=backend)

        return site(name, eager, kernel, x, scale, shift)

    def joint_norm_modulate(
        self, module: Any, streams: tuple[Tensor, Tensor], scale: Tensor, shift: Tensor
    ) -> Tensor | None:
        """norm(streams) * (1 + scale) + shift of two streams of tokens, one behind the other, in a
        graph of torch.compile without gradients; None where they have to be joined before it."""
        read = self._read("", module, streams[0], scale, shift, streams[1])
        if read is None or read[0].kind != "layer" or read[0].chain == "wan":
            return None
        _, weight, bias, eps = read
        exact, backend = self._how(streams[0], "diffusers")
        how = exact or "", backend or selection.traced()
        return JOINT_NORM(*streams, weight, scale, shift, bias, eps, *how)

    def joint_residual(self, streams: tuple[Tensor, Tensor], x: Tensor, gate: Tensor) -> Tensor:
        """streams + x * gate, where `joint_norm_modulate` did not join them."""
        if x.dtype != streams[0].dtype:
            return self.residual(torch.cat(streams, dim=1), x, gate)
        exact, backend = self._how(x, "diffusers")
        return JOINT_RESIDUAL(*streams, x, gate, exact or "", backend or selection.traced())

    def residual_norm(
        self,
        residual: Tensor,
        x: Tensor,
        module: Any,
        gate: Part = None,
        scale: Part = None,
        shift: Part = None,
        wide: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """total = residual + x * gate; returns norm(total) * (1 + scale) + shift, and total.
        `wide` has the steps in float32, and rounds the total and the result (Wan); a sum without
        a gate is then rounded once either way."""

        def eager() -> tuple[Tensor, Tensor]:
            total = added(residual, x, gate, wide)
            y = modulated(module(total.float() if wide else total), scale, shift)
            return (y.type_as(total) if wide else y), total

        name = "residual + norm" if gate is None else "gate + residual + norm"
        if scale is not None:
            name += " + modulate"
        read = self._read(name, module, residual, gate, scale, shift, x, wide=wide)
        if read is None:
            return eager()
        norm, weight, bias, eps = read
        if x.dtype != residual.dtype:
            declined(name, CHANGES_DTYPE)
            return eager()
        if self.exact and norm.chain == "wan" and not (wide or gate is scale is None):
            declined(name, ROUNDS_BETWEEN)
            return eager()
        exact, backend = self._how(x, "wan" if wide else norm.chain)
        operands = residual, x, gate, weight, bias, scale, shift, norm.kind, eps

        def kernel() -> tuple[Tensor, Tensor]:
            if (makers := self._makers(x)) is not None:
                return makers(module, RESIDUAL_NORM_QUANTIZE, *operands, backend=backend)
            return GATED_RESIDUAL_NORM(*operands, exact=exact, backend=backend)

        return site(name, eager, kernel, residual, x, gate, scale, shift)

    def residual(
        self,
        residual: Tensor,
        x: Tensor,
        gate: Part = None,
        wide: bool = False,
        reader: Any = None,
    ) -> Tensor:
        """residual + x * gate; `reader` is the module that is given the sum as it is."""

        def eager() -> Tensor:
            return added(residual, x, gate, wide)

        name = "gate + residual"
        if gate is None:
            return eager()  # one addition: nothing to fuse
        if not (wide or gate.dtype == x.dtype) or x.dtype != residual.dtype:
            declined(name, CHANGES_DTYPE)
            return eager()
        exact, backend = self._how(x, "wan" if wide else "diffusers")

        def kernel() -> Tensor:
            if reader is not None and (makers := self._makers(x)) is not None:
                return makers(reader, RESIDUAL_QUANTIZE, residual, x, gate, backend=backend)
            return GATED_RESIDUAL(residual, x, gate, exact=exact, backend=backend)

        return site(name, eager, kernel, residual, x, gate)

    def _makers(self, x: Tensor) -> Makers | None:
        """What runs a place so that it can make eight-bit rows too, if layers may want any."""
        if torch.compiler.is_compiling() or self.fp8_layers is None or torch.is_grad_enabled():
            return None
        if self.backend == "cuda" or (x.is_cuda and fp8.unsupported(x.device.index or 0)):
            return None
        return self.fp8_layers.makers


def added(residual: Tensor, x: Tensor, gate: Part, wide: bool) -> Tensor:
    """residual + x * gate"""
    if gate is None:
        return residual + x
    branch = x * gate
    return (residual.float() + branch).type_as(residual) if wide else residual + branch
