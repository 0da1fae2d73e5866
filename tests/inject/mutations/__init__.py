"""Changes that people make to models, one registry of kinds; see `core` and `steps`."""

from . import calls, hooks, lifecycle, lora, parts, weights  # noqa: F401
from .core import KINDS, Differs, NotHere, Refused, World
from .steps import UNDO, Tally, alone, names_for, replay, sequence, step

__all__ = [
    "KINDS",
    "UNDO",
    "Differs",
    "NotHere",
    "Refused",
    "Tally",
    "World",
    "alone",
    "names_for",
    "replay",
    "sequence",
    "step",
]
