"""How a reader uses copies of a chain."""

from __future__ import annotations

from dataclasses import dataclass

_SLOWEST = 64.0 * 1024
"""Bytes per second that a copy must deliver to be read on, unless the user allows less."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Say how a reader uses copies of a chain.

    Parameters
    ----------
    origin_poll
        Seconds between two requests to the origin for a commit that no copy has yet.
    patience
        Seconds to wait for data that a copy does not have yet. If the copy gets nothing new in this time, the origin is read. A copy that
        has got nothing new since this reader began is waited for a fifth of this time.
    signed
        Whether the reader checks signatures. If not, records from copies are compared with the origin's.
    slowest
        Bytes per second. A copy that delivers fewer for `patience` seconds is left alone, and the origin is read.
    """

    origin_poll: float = 5.0
    patience: float = 15.0
    signed: bool = False
    slowest: float = _SLOWEST
