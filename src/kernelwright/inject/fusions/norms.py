"""Norms, alone and together with the additions and the modulation around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import fp8, selection
from ...ops.adaln import ADALN_LAYERNORM, ADALN_RMSNORM
from ...ops.few_rows import is_few
from ...ops.fp8.rows import NORM_QUANTIZE, RESIDUAL_NORM_QUANTIZE, RESIDUAL_QUANTIZE
from ...ops.layernorm import LAYERNORM
from ...ops.residual import GATED_RESIDUAL, GATED_RESIDUAL_NORM
from ...ops.rmsnorm import RMSNORM
from ..fp8.activations import Makers
from ..fp8.suitable_layers import is_short
from ..runtime.sites import declined, site
from .base import CHANGES_DTYPE, Part, eager_modulate
from .channel_norms import ChannelNormFusions
from .compiled_ops import JOINT_NORM, JOINT_RESIDUAL

# at::mean sums strided rows in another order; and eager keeps their layout, which the convolutions
# of a VAE need: LTX-Video's decodes 49 frames in 69 ms, with contiguous rows in 98 (H200)
STRIDED = "its rows are not contiguous in memory"
AT_MEAN = ("diffusers", "transformers")
ROUNDS_BETWEEN = "no kernel rounds between a float32 norm and the steps around it"


class NormFusions(ChannelNormFusions):
    def norm(self, module: Any, x: Tensor) -> Tensor:
        """A norm alone: the forward of its module."""

        def eager() -> Tensor:
            return type(module).forward(module, x)

        read = self._norm_operands("norm", module, x, check_hooks=False)
        if read is None:
            return eager()
        norm, weight, bias, eps = read
        if norm.chain in AT_MEAN and x.shape[-1] > 1 and x.stride(-1) != 1:
            if x.ndim < 3 or self._channel_norm_problem(norm, x.movedim(-1, 1)):
                declined("norm", STRIDED)
                return eager()
            channels = x.movedim(-1, 1)
            return site(
                "norm", eager, lambda: self._channel_norm(channels, weight, eps).movedim(1, -1), x
            )
        exact, backend = self._exact_and_backend(x, norm.chain)

        def kernel() -> Tensor:
            if norm.kind == "rms":
                return RMSNORM(x, weight, eps, exact=exact, backend=backend)
            return LAYERNORM(x, weight, bias, eps, exact=exact, backend=backend)

        return site("norm", eager, kernel, x)

    def norm_modulate(
        self, module: Any, x: Tensor, scale: Part, shift: Part, float32: bool = False
    ) -> Tensor:
        """norm(x) * (1 + scale) + shift; with `float32` all in float32 and rounded once (Wan)."""

        def eager() -> Tensor:
            y = eager_modulate(module(x.float() if float32 else x), scale, shift)
            return y.type_as(x) if float32 else y

        name = "norm + modulate"
        read = self._norm_operands(name, module, x, scale, shift, float32=float32)
        if read is None:
            return eager()
        norm, weight, bias, eps = read
        rms = norm.kind == "rms"
        if rms and (norm.chain not in ("torch", "diffusers") or float32):
            declined(name, f"no kernel modulates the RMSNorm of {norm.chain}")
            return eager()
        if self.exact and norm.chain == "wan" and not float32:
            declined(name, ROUNDS_BETWEEN)
            return eager()
        exact, backend = self._exact_and_backend(
            x, norm.chain if rms else "wan" if float32 else "diffusers"
        )

        def kernel() -> Tensor:
            if (producer := self._fp8_producer(x)) is not None:
                parts = weight, bias, scale, shift, norm.kind, eps
                return producer(module, NORM_QUANTIZE, x, *parts, backend=backend)
            if rms:
                return ADALN_RMSNORM(x, weight, scale, shift, eps, exact=exact, backend=backend)
            return ADALN_LAYERNORM(x, weight, scale, shift, bias, eps, exact=exact, backend=backend)

        return site(name, eager, kernel, x, scale, shift)

    def joint_norm_modulate(
        self, module: Any, streams: tuple[Tensor, Tensor], scale: Tensor, shift: Tensor
    ) -> Tensor | None:
        """norm(x) * (1 + scale) + shift of x = two streams of tokens, concatenated: for
        torch.compile without gradients. None where the caller has to concatenate them first."""
        read = self._norm_operands("", module, streams[0], scale, shift, streams[1])
        if read is None or read[0].kind != "layer" or read[0].chain == "wan":
            return None
        _, weight, bias, eps = read
        exact, backend = self._exact_and_backend(streams[0], "diffusers")
        how = exact or "", backend or selection.traced()
        return JOINT_NORM(*streams, weight, scale, shift, bias, eps, *how)

    def joint_residual(self, streams: tuple[Tensor, Tensor], x: Tensor, gate: Tensor) -> Tensor:
        """streams + x * gate, where `joint_norm_modulate` did not concatenate them."""
        if x.dtype != streams[0].dtype:
            return self.residual(torch.cat(streams, dim=1), x, gate)
        exact, backend = self._exact_and_backend(x, "diffusers")
        return JOINT_RESIDUAL(*streams, x, gate, exact or "", backend or selection.traced())

    def residual_norm(
        self,
        residual: Tensor,
        x: Tensor,
        module: Any,
        gate: Part = None,
        scale: Part = None,
        shift: Part = None,
        float32: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """total = residual + x * gate; returns norm(total) * (1 + scale) + shift, and total.
        With `float32` the steps are in float32, and total and result are rounded (Wan); without a
        gate the sum is rounded once either way."""

        def eager() -> tuple[Tensor, Tensor]:
            total = eager_residual(residual, x, gate, float32)
            y = eager_modulate(module(total.float() if float32 else total), scale, shift)
            return (y.type_as(total) if float32 else y), total

        name = "residual + norm" if gate is None else "gate + residual + norm"
        if scale is not None:
            name += " + modulate"
        read = self._norm_operands(name, module, residual, gate, scale, shift, x, float32=float32)
        if read is None:
            return eager()
        norm, weight, bias, eps = read
        if x.dtype != residual.dtype:
            declined(name, CHANGES_DTYPE)
            return eager()
        if self.exact and norm.chain == "wan" and not (float32 or gate is scale is None):
            declined(name, ROUNDS_BETWEEN)
            return eager()
        exact, backend = self._exact_and_backend(x, "wan" if float32 else norm.chain)
        operands = residual, x, gate, weight, bias, scale, shift, norm.kind, eps

        def kernel() -> tuple[Tensor, Tensor]:
            if (producer := self._fp8_producer(x)) is not None:
                return producer(module, RESIDUAL_NORM_QUANTIZE, *operands, backend=backend)
            return GATED_RESIDUAL_NORM(*operands, exact=exact, backend=backend)

        return site(name, eager, kernel, residual, x, gate, scale, shift)

    def residual(
        self,
        residual: Tensor,
        x: Tensor,
        gate: Part = None,
        float32: bool = False,
        reader: Any = None,
    ) -> Tensor:
        """residual + x * gate; `reader` is the module that gets the sum as its input."""

        def eager() -> Tensor:
            return eager_residual(residual, x, gate, float32)

        name = "gate + residual"
        if gate is None:
            return eager()  # one addition: nothing to fuse
        if not (float32 or gate.dtype == x.dtype) or x.dtype != residual.dtype:
            declined(name, CHANGES_DTYPE)
            return eager()
        exact, backend = self._exact_and_backend(x, "wan" if float32 else "diffusers")

        def kernel() -> Tensor:
            if reader is not None and (producer := self._fp8_producer(x)) is not None:
                return producer(reader, RESIDUAL_QUANTIZE, residual, x, gate, backend=backend)
            return GATED_RESIDUAL(residual, x, gate, exact=exact, backend=backend)

        return site(name, eager, kernel, residual, x, gate)

    def _fp8_producer(self, x: Tensor) -> Makers | None:
        """The fp8 producer for this site, or None if no fp8 layer can follow."""
        if self.fp8_layers is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return None
        if is_few(x) and is_short(x):  # its readers take rows in 16 bits
            return None
        if self.backend == "cuda" or (x.is_cuda and fp8.unsupported(x.device.index or 0)):
            return None
        return self.fp8_layers.makers


def eager_residual(residual: Tensor, x: Tensor, gate: Part, float32: bool) -> Tensor:
    """residual + x * gate"""
    if gate is None:
        return residual + x
    branch = x * gate
    return (residual.float() + branch).type_as(residual) if float32 else residual + branch
