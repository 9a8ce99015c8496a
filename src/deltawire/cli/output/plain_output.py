"""Output for terminals and pipes that cannot show every character: ASCII characters replace those that their encoding lacks."""

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
"""Each character of pictures and tables becomes one character, so that columns stay aligned."""


def never_fail_to_print() -> None:
    """Make stdout and stderr replace characters that they cannot encode. Call it once, when the process starts."""
    codecs.register_error(_HANDLER, _replace)
    for stream in (sys.stdout, sys.stderr):
        _reconfigure(stream)


def _reconfigure(stream: TextIO | None) -> None:
    reconfigure = getattr(stream, "reconfigure", None)  # a test may have replaced the stream by another kind
    if reconfigure is not None:
        reconfigure(errors=_HANDLER)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_in_ascii, error.object[error.start : error.end])), error.end


def _in_ascii(character: str) -> str:
    if character in _ASCII:
        return _ASCII[character]
    if "\u2800" <= character <= "\u28ff":  # spinners are drawn with these
        return "*"
    return "?"
