"""Turns what a store says into values that are safe to send: short strings and finite numbers."""

from __future__ import annotations

import math

_LONGEST_NUMBER = 40


def short(text: str, most: int) -> str:
    """Return the text without control characters, cut to `most` characters. Surrogates, which JSON cannot carry, are replaced."""
    clean = "".join(one if one.isprintable() else " " for one in text[: 4 * most].encode(errors="replace").decode())
    return clean if len(clean) <= most else clean[: most - 1] + "…"


def number_in(text: str | None) -> float | None:
    """Return the number that a string holds. None if it holds none, or one that is not finite."""
    if text is None or len(text) > _LONGEST_NUMBER:
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
