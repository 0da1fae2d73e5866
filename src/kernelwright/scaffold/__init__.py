"""`kernelwright new`: writes a working op, to be changed into the one you want."""

from __future__ import annotations

from .create import KINDS, LANGUAGES, Created, create
from .names import BadName
from .next_steps import page

__all__ = ["KINDS", "LANGUAGES", "BadName", "Created", "create", "page"]
