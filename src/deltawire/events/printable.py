"""Text that is safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return text that is safe to print: characters that could move the cursor or change colours are replaced."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
