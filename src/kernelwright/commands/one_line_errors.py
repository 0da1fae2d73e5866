"""Errors of a run as a command shows them: one line, and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ..errors import BadSetting, CannotRun


@contextmanager
def one_line_errors(command: str, about_options: type[ValueError] = BadSetting) -> Iterator[None]:
    """Exit with 1 where something is missing, with 2 for errors of the type `about_options`."""
    try:
        yield
    except CannotRun as missing:
        typer.echo(f"kernelwright {command}: {missing}", err=True)
        raise typer.Exit(1) from None
    except about_options as wrong:
        raise typer.BadParameter(str(wrong), param_hint=getattr(wrong, "option", None)) from None
