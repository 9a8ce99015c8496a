"""Output for terminals and pipes that cannot show every character: what their encoding lacks is written with ASCII characters."""

from __future__ import annotations

import codecs
import sys
from typing import TextIO

_HANDLER = "deltawire"

_ASCII = {
    **dict(zip("▁▂▃▄▅▆▇█", ".,:-=+*#", strict=True)),
    **dict(zip("■·◆╪↩×╰─╯┴│↷", "#.*|<x\\-/+|>", strict=True)),
    "→": "->",
    "≈": "~",
    "±": "+-",
    "–": "-",
    "—": "-",
    "−": "-",
    "…": "...",
    "•": "*",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "\N{NO-BREAK SPACE}": " ",
}
"""Characters of pictures and tables become one character each, so that columns stay aligned."""


def never_fail_to_print() -> None:
    """Let stdout and stderr replace what they cannot encode, instead of failing. Call it once, when the process starts."""
    codecs.register_error(_HANDLER, _replace)
    for stream in (sys.stdout, sys.stderr):
        _reconfigure(stream)


def _reconfigure(stream: TextIO | None) -> None:
    reconfigure = getattr(stream, "reconfigure", None)  # a stream that a test or a program has put there may be of another kind
    if reconfigure is not None:
        reconfigure(errors=_HANDLER)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_in_ascii, error.object[error.start : error.end])), error.end


def _in_ascii(character: str) -> str:
    if character in _ASCII:
        return _ASCII[character]
    if "\u2800" <= character <= "\u28ff":  # what spinners are drawn with
        return "*"
    return "?"
