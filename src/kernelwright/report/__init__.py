"""Result files as one HTML page, as pictures, and the differences of two runs."""

from __future__ import annotations

from .comparing import Change, Comparison, compare
from .html_page import page
from .json_values import Unreadable
from .reading import Results, read

__all__ = ["Change", "Comparison", "Results", "Unreadable", "compare", "page", "read"]
