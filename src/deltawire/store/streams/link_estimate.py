"""The measured quality of the link between this process and a store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """Describes a link as recent transfers found it.

    Parameters
    ----------
    goodput
        Useful bytes per second, over all transfers at the same time. None before enough bytes have moved.
    latency
        Seconds from a request to the first byte of its answer. None before the first answer.
    streams
        How many transfers run at the same time.
    failures
        How many transfers were cut, timed out, or were refused because the service was overloaded.
    """

    goodput: float | None = None
    latency: float | None = None
    streams: int = 4
    failures: int = 0
