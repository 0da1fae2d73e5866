"""Norms over the channels of a picture or video, as convolutions hold it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...ops.channel_norm import CHANNEL_NORM, problem
from ..identify.norm_kinds import Norm
from ..runtime.sites import declined, site
from ..state.hooks import is_plain
from .base import Part, Places, hooked_now, modulated

NOT_EXACT = "no kernel sums over channels in the order that eager does"


class ChannelPlaces(Places):
    def channel_norm_silu(
        self, module: Any, activation: Any, x: Tensor, scale: Part = None, shift: Part = None
    ) -> Tensor:
        """SiLU(norm(x) * (1 + scale) + shift): [B, C, *positions], the norm over C; scale and
        shift are [B, C, 1, ...]."""

        def eager() -> Tensor:
            y = module(x.movedim(1, -1)).movedim(-1, 1)
            return activation(modulated(y, scale, shift))

        name = "channel norm + SiLU" if scale is None else "channel norm + modulate + SiLU"
        if not is_plain(activation, nn.SiLU):
            declined(name, f"no kernel for its {type(activation).__name__}")
            return eager()
        if hooked_now(activation):
            declined(name, "a hook wants to see the activation being called")
            return eager()
        read = self._read(name, module, x, scale, shift)
        if read is None:
            return eager()
        norm, weight, _, eps = read
        if no := self._not_by_channel(norm, x):
            declined(name, no)
            return eager()

        return site(name, eager, lambda: self._by_channel(x, weight, eps, "silu", scale, shift), x)

    def _by_channel(
        self,
        x: Tensor,
        weight: Part,
        eps: float,
        activation: str = "none",
        scale: Part = None,
        shift: Part = None,
    ) -> Tensor:
        return CHANNEL_NORM(x, weight, scale, shift, activation, eps, backend=self.backend)

    def _not_by_channel(self, norm: Norm, x: Tensor) -> str | None:
        """Why the kernel cannot do this norm over dimension 1, or None if it can."""
        if self.exact:
            return NOT_EXACT
        if self.backend == "cuda":
            return "its kernel is Triton's"
        return problem(x) if norm.kind == "rms" else f"no kernel for a {norm.kind} norm of channels"
