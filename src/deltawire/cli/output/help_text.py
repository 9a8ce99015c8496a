"""Makes the help of commands shorter: flags show no type, and required arguments no braces, which some releases of typer add."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class _PlainHelp:
    """Changes what typer prints about the parameters of a command."""

    def get_params(self, ctx: Any) -> Any:
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.replace("{", "").replace("}", "") for piece in pieces]


class PlainCommand(_PlainHelp, TyperCommand):
    """A command with plain help."""


class PlainGroup(_PlainHelp, TyperGroup):
    """A group of commands with plain help."""
