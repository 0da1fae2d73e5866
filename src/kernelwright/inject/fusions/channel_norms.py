"""Norms over dimension 1, the channels of an image or video."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...ops.channel_norm import CHANNEL_NORM
from ...ops.channel_norm.limits import problem
from ..identify.norm_kinds import Norm
from ..runtime.sites import declined, site
from ..state.hooks import is_plain
from .base import BaseFusions, Part, eager_modulate, hooked_now

NOT_EXACT = "no kernel sums over channels in the order that eager does"


class ChannelNormFusions(BaseFusions):
    def channel_norm_silu(
        self, module: Any, activation: Any, x: Tensor, scale: Part = None, shift: Part = None
    ) -> Tensor:
        """SiLU(norm(x) * (1 + scale) + shift): [B, C, *positions], the norm over C; scale and
        shift are [B, C, 1, ...]."""

        def eager() -> Tensor:
            y = module(x.movedim(1, -1)).movedim(-1, 1)
            return activation(eager_modulate(y, scale, shift))

        name = "channel norm + SiLU" if scale is None else "channel norm + modulate + SiLU"
        if not is_plain(activation, nn.SiLU):
            declined(name, f"no kernel for its {type(activation).__name__}")
            return eager()
        if hooked_now(activation):
            declined(name, "a hook is on its activation")
            return eager()
        read = self._norm_operands(name, module, x, scale, shift)
        if read is None:
            return eager()
        norm, weight, _, eps = read
        if no := self._channel_norm_problem(norm, x):
            declined(name, no)
            return eager()

        return site(
            name, eager, lambda: self._channel_norm(x, weight, eps, "silu", scale, shift), x
        )

    def _channel_norm(
        self,
        x: Tensor,
        weight: Part,
        eps: float,
        activation: str = "none",
        scale: Part = None,
        shift: Part = None,
    ) -> Tensor:
        return CHANNEL_NORM(x, weight, scale, shift, activation, eps, backend=self.backend)

    def _channel_norm_problem(self, norm: Norm, x: Tensor) -> str | None:
        """Why the kernel cannot compute this norm over dimension 1, or None."""
        if self.exact:
            return NOT_EXACT
        if self.backend == "cuda":
            return "its kernel is written in Triton"
        return problem(x) if norm.kind == "rms" else f"no kernel for a {norm.kind} norm of channels"
