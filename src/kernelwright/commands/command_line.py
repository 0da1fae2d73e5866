"""Help pages: commands in an order of their own, and flags without a type.

Typer lists groups after commands, and prints `<bool>` beside a flag as if it took a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup


def _without_flag_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))


class Group(TyperGroup):
    order: ClassVar[Sequence[str]] = ()

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Those of `order`, then the others as they were added."""
        names = super().list_commands(ctx)
        first = [name for name in self.order if name in names]
        return [*first, *(name for name in names if name not in first)]


class CommandLine(typer.Typer):
    """`typer.Typer` whose commands and groups have such help pages."""

    def __init__(self, *, cls: type[Group] = Group, **how: Any) -> None:
        super().__init__(cls=cls, no_args_is_help=True, **how)

    def command(self, name: str | None = None, **how: Any) -> Callable[..., Any]:
        return super().command(name, cls=Command, **how)


def spaced(configs: str) -> str:
    """A default of several configurations as help shows it, where a long word would be cut."""
    return configs.replace(",", ", ")


def split(text: str) -> list[str]:
    """What is named, comma-separated, with or without blanks."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise typer.BadParameter(f"{text!r} names nothing between two commas or at an end")
    return names
