"""Errors that a command prints as one line."""

from __future__ import annotations


class CannotRun(RuntimeError):
    """Something is missing; the message says what to do."""


class BadSetting(ValueError):
    """An option has a value that cannot be used."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option
