"""Options that limit how much of a link and of a service a command uses."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from ...store import StoreOptions

_RATE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)(k|M|G|ki|Mi|Gi)?(bit|B)(?:/s)?")
_PREFIXES = {None: 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}


def read_rate(text: str | None) -> str | None:
    """Return the text unchanged. A text that is not a rate is wrong usage."""
    if text is not None and bytes_per_second(text) is None:
        raise typer.BadParameter(f"{text[:64]!r} is not a rate. Write a number with a unit, such as 200Mbit, 25MB or 1.5GiB.")
    return text


def bytes_per_second(text: str) -> float | None:
    """Return the bytes per second of a text such as `200Mbit` or `25MB`, or None if it is not a rate above 0."""
    found = _RATE.fullmatch(text)
    if found is None:
        return None
    rate = float(found[1]) * _PREFIXES[found[2]] / (8 if found[3] == "bit" else 1)
    return rate if rate > 0 else None


def read_requests(number: float | None) -> float | None:
    """Return the number unchanged. A number that allows no request is wrong usage."""
    if number is not None and not 0 < number < math.inf:
        raise typer.BadParameter("it must be a number above 0.")
    return number


MaxRateOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--max-rate",
        metavar="RATE",
        help="Send and receive at most this much per second, such as 200Mbit or 25MB. Directories have no limit.",
        show_default=False,
        callback=read_rate,
    ),
]
MaxRequestsOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--max-requests",
        metavar="N",
        help="Send at most this many requests per second to the store.",
        show_default=False,
        callback=read_requests,
    ),
]


def store_options(max_rate: str | None, max_requests: float | None) -> StoreOptions | None:
    """Return the options of a store with these limits, or None if there are none.

    Parameters
    ----------
    max_rate
        The value of --max-rate.
    max_requests
        The value of --max-requests.
    """
    if max_rate is None and max_requests is None:
        return None
    from ...store import StoreOptions

    return StoreOptions(max_rate=None if max_rate is None else bytes_per_second(max_rate), max_requests=max_requests)
