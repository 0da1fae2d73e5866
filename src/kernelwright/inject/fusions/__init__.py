"""The places where a model's steps become one kernel.

Every method is one such place: the eager steps, as the model libraries write them, beside the op
that does the same in one pass. Recipes call these; they decide nothing about numerics themselves.
"""

from __future__ import annotations

from .attention import AttentionPlaces
from .base import hooked_now
from .feed_forward import FeedForwardPlaces
from .norms import NormPlaces
from .projections import GATE_UP, QKV, TEXT_QKV
from .prompt import TextPlaces

__all__ = ["GATE_UP", "QKV", "TEXT_QKV", "Fusions", "hooked_now"]


class Fusions(NormPlaces, TextPlaces, AttentionPlaces, FeedForwardPlaces):
    """How the places of one injection are fused."""
