"""Errors that a command prints as one line, and other errors in one line."""

from __future__ import annotations


class CannotRun(RuntimeError):
    """Something is missing; the message says what to do."""


class BadSetting(ValueError):
    """An option has a value that cannot be used."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


def in_one_line(error: Exception) -> str:
    """The class of an error and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
