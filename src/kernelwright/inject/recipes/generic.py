"""For every model: norms, gated activations and feed-forwards, one module at a time."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor, nn

from ..fusions import Fusions
from ..identify import norm_kinds
from ..identify.norm_kinds import Norm
from ..runtime import work_ahead
from ._recipe import Forward, Patch, Recipe, full_name


def norm(fuse: Fusions) -> Forward:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs:  # classes name their input differently
            return NotImplemented
        (x,) = args
        ahead = work_ahead.take(self, x)
        if ahead is not None:
            return ahead
        if fuse.is_of_prompt(x):  # SANA normalises its text once before all blocks
            return fuse.once_per_prompt(self, x, (self,), lambda: fuse.norm(self, x))
        return fuse.norm(self, x)

    return forward


def is_norm(module: nn.Module) -> bool | str:
    if not norm_kinds.looks_like_norm(module):
        return False
    found = norm_kinds.describe(module)
    if not isinstance(found, Norm):
        return found
    # a gated norm computes a plain one if called without its gate
    alone = len(signature(type(module).forward).parameters) == 2
    return True if alone else "its forward takes more than the rows"


def geglu(fuse: Fusions) -> Forward:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:  # diffusers warns about a deprecated scale here
            return NotImplemented
        return fuse.geglu(self, hidden_states)

    return forward


def is_geglu(module: nn.Module) -> bool | str:
    return full_name(type(module)) == "diffusers.models.activations.GEGLU"


def feed_forward(fuse: Fusions) -> Forward:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:  # diffusers warns about a deprecated scale here
            return NotImplemented
        return fuse.feed_forward(self, hidden_states)

    return forward


def is_feed_forward(module: Any) -> bool | str:
    """Linear, GELU, Linear."""
    if full_name(type(module)) != "diffusers.models.attention.FeedForward":
        return False
    first = full_name(type(module.net[0]))
    if first == "diffusers.models.activations.GEGLU":
        return "its GEGLU is replaced on its own"
    return first == "diffusers.models.activations.GELU" or f"no kernel for its {first}"


RECIPE = Recipe(
    family="any model",
    generic=True,
    patches=(
        Patch(is_norm, norm, "the norm in one kernel"),
        Patch(
            is_geglu,
            geglu,
            "GEGLU in one kernel",
            sources=("GEGLU.forward", "GEGLU.gelu"),
            written_for=("9b3974d20013",),
        ),
        Patch(
            is_feed_forward,
            feed_forward,
            "GELU in one kernel, or in the epilogue of the GEMM before it",
            sources=("FeedForward.forward", "GELU.forward", "GELU.gelu"),
            written_for=("382acbd5c433",),
        ),
    ),
)
