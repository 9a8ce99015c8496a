"""Reports wrong usage as JSON on stdout if `--json` is given, as all other errors are reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from ..output.help_text import PlainGroup
from ..output.terminal import print_json_line

_UsageError: Any = typer.BadParameter.__mro__[1]
"""`UsageError` of click, or of the copy of click that newer releases of typer contain."""


class CommandsWithJsonErrors(PlainGroup):
    """Prints a JSON object about wrong usage if `--json` is among the arguments. Stderr and the exit code do not change."""

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **options: Any) -> Any:
        self._as_json = "--json" in args
        with self._reporting():
            return super().make_context(info_name, args, *others, **options)

    def invoke(self, ctx: Any) -> Any:
        with self._reporting():
            return super().invoke(ctx)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except _UsageError as error:
            _suggest_at(error)
            _suggest_from(error)
            error.message = error.message.removeprefix("Value error, ")  # some releases of typer name the type of their own error
            message = error.format_message()
            if self._as_json and message:  # an error without a message is a request for help
                print_json_line({"error": {"type": "UsageError", "message": message}})
            raise


def _suggest_from(error: Any) -> None:
    """Say how the chain is given, to users who give it as an argument to a command that has `--from URL`."""
    missing = getattr(error, "param", None) if type(error).__name__ == "MissingParameter" else None
    if missing is not None and "--from" in missing.opts and missing.metavar == "URL":
        error.message = "Give the chain as --from URL."


def _suggest_at(error: Any) -> None:
    """Suggest `--at` to users who pass `--version` to a command that has `--at`."""
    if getattr(error, "option_name", None) != "--version" or error.ctx is None:
        return
    if any("--at" in parameter.opts for parameter in error.ctx.command.params):
        error.possibilities = ["--at"]
