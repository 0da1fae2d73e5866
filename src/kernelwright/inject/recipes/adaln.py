"""The adaptive norms that many models of diffusers share.

A norm without weights of its own, modulated by a projection of the timestep: norm and modulation
become one kernel. A block may run those of the next block together with its own last addition
(`adaptive_norm`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..fusions import Fusions, hooked_now
from ._recipe import Forward, Patch, Recipe, full_name

MODULE = "diffusers.models.normalization"
# into how many parts the projection is split
PARTS = {
    "AdaLayerNormZero": 6,
    "AdaLayerNormZeroSingle": 3,
    "SD35AdaLayerNormZeroX": 9,
    "AdaLayerNormContinuous": 2,
}


def adaptive_norm(
    fuse: Fusions,
    module: Any,
    temb: Tensor,
    x: Tensor,
    branch: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The output of an adaptive norm for total = x, or x + branch * gate; and that total."""
    name = type(module).__name__
    if name == "AdaLayerNormContinuous":
        scale, shift = module.linear(module.silu(temb).to(x.dtype)).chunk(PARTS[name], dim=1)
        rest = []
    else:
        shift, scale, *rest = module.linear(module.silu(temb)).chunk(PARTS[name], dim=1)
    if branch is None:
        rows, total = fuse.norm_modulate(module.norm, x, scale[:, None], shift[:, None]), x
    else:
        rows, total = fuse.residual_norm(
            x, branch, module.norm, gate, scale[:, None], shift[:, None]
        )
    if name == "SD35AdaLayerNormZeroX":
        *rest, shift, scale, last_gate = rest
        second = fuse.norm_modulate(module.norm, total, scale[:, None], shift[:, None])
        rest = [*rest, second, last_gate]
    return (rows, *rest), total


def can_fuse_adaptive_norm(module: Any, temb: Tensor) -> bool:
    """Whether `adaptive_norm` may replace calling this module with this embedding."""
    return (
        type(module).__name__ in PARTS
        and full_name(type(module)).startswith(MODULE)
        and getattr(module, "emb", None) is None
        and temb.ndim == 2
        and not hooked_now(module)
        and not hooked_now(module.norm)
    )


def zero(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        x: Tensor,
        timestep: Tensor | None = None,
        class_labels: Tensor | None = None,
        hidden_dtype: Any = None,
        emb: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        if self.emb is not None:
            emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        elif emb is None or emb.ndim != 2:
            return NotImplemented
        return adaptive_norm(fuse, self, emb, x)[0]

    return forward


def zero_single(fuse: Fusions) -> Forward:
    def forward(self: Any, x: Tensor, emb: Tensor | None = None) -> tuple[Tensor, ...]:
        if emb is None or emb.ndim != 2:
            return NotImplemented
        return adaptive_norm(fuse, self, emb, x)[0]

    return forward


def zero_x(fuse: Fusions) -> Forward:
    def forward(self: Any, hidden_states: Tensor, emb: Tensor | None = None) -> tuple[Tensor, ...]:
        # eager calls the norm once and modulates twice; here the norm runs twice
        if emb is None or emb.ndim != 2 or hooked_now(self.norm):
            return NotImplemented
        return adaptive_norm(fuse, self, emb, hidden_states)[0]

    return forward


def continuous(fuse: Fusions) -> Forward:
    def forward(self: Any, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        if conditioning_embedding.ndim != 2:
            return NotImplemented
        return adaptive_norm(fuse, self, conditioning_embedding, x)[0][0]

    return forward


KINDS = (
    ("AdaLayerNormZero", zero, "395d9b78a851"),
    ("AdaLayerNormZeroSingle", zero_single, "46452befc7af"),
    ("SD35AdaLayerNormZeroX", zero_x, "6c9c90e5f0b2"),
    ("AdaLayerNormContinuous", continuous, "3d1df6a6c05a"),
)
RECIPE = Recipe(
    family="adaptive norms of diffusers",
    patches=tuple(
        Patch(
            f"{MODULE}.{name}",
            forward,
            "norm + modulate in one kernel",
            covers=("norm",),
            sources=(f"{name}.forward",),
            written_for=(fingerprint,),
        )
        for name, forward, fingerprint in KINDS
    ),
)
