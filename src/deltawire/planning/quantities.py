"""Turns text with units into numbers, and refuses numbers that no plan can use. Pure.

Every function raises `UnusablePlan` with the name of what was given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ..errors import UnusablePlan

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?|\.[0-9]+)\s*([A-Za-zµ%/]*)\s*")

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_SIZES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_RATES = {
    f"{prefix}{unit}{end}": factor * bits
    for prefix, factor in (_DECIMAL | _BINARY).items()
    for unit, bits in (("bit", 1), ("B", 8))
    for end in ("", "/s")
}
_TIMES = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

MOST_WEIGHTS = 1e15
"""Largest number of weights that can be planned for."""

MOST_BYTES = 1e18
"""Largest size that can be planned for."""


def count(text: str, what: str = "the number of weights") -> float:
    """Return a number of weights: `8B`, `1T`, `70e9`."""
    return checked(_scaled(text, _COUNTS, what, "8B, 1T or 70e9"), what, most=MOST_WEIGHTS, least=1)


def size(text: str, what: str) -> float:
    """Return a number of bytes: `202MB`, `20.3GiB`."""
    return checked(_scaled(text, _SIZES, what, "202MB or 20.3GiB"), what, most=MOST_BYTES, least=1)


def rate(text: str, what: str) -> float:
    """Return bits per second: `1Gbit`, `250Mbit/s`, `10GB/s`."""
    return checked(_scaled(text, _RATES, what, "1Gbit or 10GB/s"), what, most=1e16, least=1)


def duration(text: str, what: str, *, least: float = 0.0) -> float:
    """Return seconds: `80ms`, `60s`, `2min`."""
    return checked(_scaled(text, _TIMES, what, "80ms, 60s or 2min"), what, most=1e7, least=least)


def share(text: str, what: str) -> float:
    """Return a share from 0 to 1: `0.11%`, `0.0011`."""
    return checked(_scaled(text, {"": 1.0, "%": 0.01}, what, "0.11% or 0.0011"), what, most=1.0, least=1e-9)


def checked(value: float, what: str, *, most: float, least: float = 0.0) -> float:
    """Return the value if it is finite and within its bounds."""
    if not math.isfinite(value) or not least <= value <= most:
        raise UnusablePlan(f"{what} must be from {least:g} to {most:g}, not {value:g}.")
    return value


def _scaled(text: str, units: Mapping[str, float], what: str, examples: str) -> float:
    found = _NUMBER.fullmatch(text) if len(text) <= 64 else None
    if found is None or found[2] not in units:
        raise UnusablePlan(f"{what} is {text[:64]!r}, which is not a number with a unit. Write it like {examples}.", hint="")
    return float(found[1]) * units[found[2]]
