"""Result files made readable: one HTML page, pictures, and what changed between two runs."""

from __future__ import annotations

from .comparing import Change, Comparison, compare
from .page import page
from .reading import Results, read
from .values import Unreadable

__all__ = ["Change", "Comparison", "Results", "Unreadable", "compare", "page", "read"]
