"""Warnings that name this library and point at the user's line."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

# what calls our code on behalf of the user
LIBRARIES = (__name__.partition(".")[0], "torch", "diffusers", "transformers", "accelerate", "peft")


def warn(message: str) -> None:
    """Warn at the innermost line that is neither ours nor of a library that runs models."""
    at = sys._getframe(1)
    frame: FrameType | None = at
    while frame is not None and _on_the_way(frame):
        frame = frame.f_back
    at = frame or at  # a thread of our own has no line of the user
    warnings.warn_explicit(
        f"kernelwright: {message}",
        UserWarning,
        at.f_code.co_filename,
        at.f_lineno,
        module=at.f_globals.get("__name__"),
        registry=at.f_globals.setdefault("__warningregistry__", {}),
    )


def _on_the_way(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")  # generated functions have none
    return name is None or name.partition(".")[0] in LIBRARIES
