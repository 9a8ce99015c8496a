"""Text on stdout and stderr.

Results go to stdout, and everything else to stderr. With `--json`, stdout carries only JSON, even after an error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from .figures import printable, wrap_words

_TITLE = 20
"""The width of the titles of rows."""

_SHORTEST = 20
"""The least number of columns for the text of a labelled line, however narrow the terminal is."""

NARROW = 60
"""On a terminal with fewer columns, long texts are printed below their titles instead of to the right of them."""


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON object on stdout. Paths and names may hold any character, so the text is ASCII with escapes."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_json_line(document: dict[str, Any], to: TextIO | None = None) -> None:
    """Print one JSON object on one line, for commands that report while they run. `to` replaces stdout."""
    stream = to or sys.stdout
    stream.write(json.dumps(document, allow_nan=False) + "\n")
    stream.flush()


def print_rows(heading: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print a result as a heading and rows of (title, text). Rows without text are left out; long texts are wrapped."""
    console = result_console()
    print_wrapped(console, heading, style="bold")
    for title, text in rows:
        if text:
            _print_row(console, printable(title), printable(text))


def print_line(text: str) -> None:
    """Print one line of a result."""
    print_wrapped(result_console(), text, indent=4)


def print_labelled(label: str, text: str, *, is_notice: bool, to: TextIO | None = None) -> None:
    """Print a line of a log, with a label before each part of it.

    In a terminal long lines break between words. In a file or a pipe they do not break, so that each can be searched for.

    Parameters
    ----------
    label
        The text before the line; nothing if empty.
    text
        The line.
    is_notice
        Print on stderr instead of stdout.
    to
        Replaces stdout.
    """
    console = Console(stderr=is_notice, file=None if is_notice else to, highlight=False)
    start = printable(f"{label}  ") if label else ""
    width = max(_SHORTEST, console.width - cell_len(start)) if console.is_terminal else sys.maxsize
    for line in wrap_words(printable(text), width, indent=4):
        console.print(Text(start + line, style="yellow" if is_notice else ""), soft_wrap=True)


def print_wrapped(console: Console, text: str, *, style: str = "", indent: int = 0) -> None:
    """Print text that breaks only between words. All lines except the first are indented."""
    for line in wrap_words(printable(text), console.width, indent=indent):
        console.print(Text(line, style=style), soft_wrap=True)


def print_notice(message: str) -> None:
    """Print a line on stderr about a problem that the command deals with."""
    print_wrapped(error_console(), message, style="yellow", indent=2)


def print_error(message: str) -> None:
    """Print a line on stderr about the error that ends the command."""
    print_wrapped(error_console(), message, style="red", indent=2)


def print_trace(message: str) -> None:
    """Print a line on stderr with the time, for --verbose."""
    print_wrapped(error_console(), f"{time.strftime('%H:%M:%S')} {message}", style="dim", indent=9)


def result_console() -> Console:
    """Return a console for stdout. In a file or a pipe its width has no limit, unless COLUMNS is set."""
    return _without_limit(Console(highlight=False))


_stderr: tuple[object, Console] | None = None


def error_console() -> Console:
    """Return the one console of the current stderr. It prints lines above a progress bar instead of into it."""
    global _stderr
    stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # rich replaces stderr while a bar is shown
    if _stderr is None or _stderr[0] is not stream:
        _stderr = (stream, _without_limit(Console(stderr=True, highlight=False)))
    return _stderr[1]


def _print_row(console: Console, title: str, text: str) -> None:
    start = f"  {title:<{_TITLE}}"
    room = console.width - cell_len(start)
    longest = max(map(cell_len, text.split(" ")))
    if longest <= room and (console.width >= NARROW or cell_len(text) <= room):
        first, *rest = wrap_words(text, room)
        console.print(Text.assemble((start, "dim"), first), soft_wrap=True)
        indent = cell_len(start)
    else:  # there is more room below the title
        console.print(Text(start.rstrip(), style="dim"), soft_wrap=True)
        indent, rest = 4, wrap_words(text, console.width - 4)
    for line in rest:
        console.print(Text(" " * indent + line), soft_wrap=True)


def _without_limit(console: Console) -> Console:
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 10_000
    return console
