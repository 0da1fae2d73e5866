"""`kernelwright new`: a folder with an op that works, to be changed into the one that is wanted."""

from __future__ import annotations

from .create import KINDS, LANGUAGES, Created, create
from .names import BadName
from .page import page

__all__ = ["KINDS", "LANGUAGES", "BadName", "Created", "create", "page"]
