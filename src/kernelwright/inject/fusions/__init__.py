"""The fusion sites: where several steps of a model become one kernel.

Each method is one site: the eager steps, as the model libraries write them, beside the op that
computes the same in one pass. Recipes call these methods; the methods choose numerics and backend.
"""

from __future__ import annotations

from .base import hooked_now
from .few_rows import FewRowsFusions
from .norms import NormFusions
from .projections import GATE_UP, QKV, TEXT_QKV
from .prompt import PromptFusions
from .static_cache import StaticCacheFusions

__all__ = ["GATE_UP", "QKV", "TEXT_QKV", "Fusions", "hooked_now"]


class Fusions(NormFusions, PromptFusions, StaticCacheFusions, FewRowsFusions):
    """All fusion sites of one injection."""
