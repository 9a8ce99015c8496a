"""The time to move objects over a link with a rate and a round-trip time, in several streams. Pure.

A stream asks for an object, waits one round trip and the server's time, and receives it. The first object of each stream comes in the slow
start of TCP: ten segments in the first round trip, and twice as many in each that follows, up to the stream's share of the rate. After that
waiting or the rate bounds all streams together, whichever is slower. Two constants are fitted to measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UnusablePlan
from .quantities import checked, duration, rate

PIECE_BYTES = 8 << 20
"""Stores are read in ranges of at most this size, so that one large object uses several streams."""

MOST_STREAMS = 64

_HEADERS = 40
"""Bytes of the headers of IP and TCP in each packet."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection from one network to another.

    Parameters
    ----------
    rate
        Bits per second.
    rtt
        Seconds for a round trip.
    mtu
        Bytes of the largest packet.
    """

    rate: float
    rtt: float
    mtu: int = 1500

    def __post_init__(self) -> None:
        checked(self.rate, "The rate of a link, in bits per second,", most=1e16, least=1)
        checked(self.rtt, "The round-trip time of a link, in seconds,", most=3600)
        checked(self.mtu, "The size of packets", most=1 << 20, least=100)


def parse_link(text: str, what: str = "The link") -> Link:
    """Return the link of a text: its rate and its round-trip time, such as `1Gbit/80ms`.

    Parameters
    ----------
    text
        The text.
    what
        The name of the link in errors.
    """
    speed, _, delay = text.rpartition("/")
    if not speed:
        raise UnusablePlan(f"{what} is {text[:64]!r}. Write a rate and a round-trip time, like 1Gbit/80ms.", hint="")
    return Link(rate(speed, f"the rate of {what}"), duration(delay, f"the round-trip time of {what}"))


@dataclass(frozen=True, slots=True)
class LinkModel:
    """The constants of the model.

    Parameters
    ----------
    server_seconds
        Seconds from a request to the first byte, without the network.
    efficiency
        The share of a link's rate that arrives as useful bytes.
    """

    server_seconds: float
    efficiency: float


@dataclass(frozen=True, slots=True)
class MeasuredTransfer:
    """A transfer that was measured: this many objects and bytes in all, over a link, in so many streams, took so many seconds."""

    objects: int
    nbytes: float
    link: Link
    streams: int
    seconds: float


_EMULATED = Link(1e9, 0.080, 9000)

MEASURED = (
    MeasuredTransfer(64, 64 * 1.16e6, _EMULATED, 1, 8.3),
    MeasuredTransfer(64, 64 * 1.16e6, _EMULATED, 4, 2.2),
    MeasuredTransfer(64, 64 * 1.16e6, _EMULATED, 8, 1.6),
    MeasuredTransfer(64, 64 * 1.16e6, _EMULATED, 16, 0.965),
    MeasuredTransfer(64, 64 * 1.16e6, _EMULATED, 32, 0.855),
)
"""Emulated link, SeaweedFS as the S3 server, TCP with BBR. Each is the middle of the runs, which differed by up to 34%."""

CALIBRATED = LinkModel(server_seconds=0.025, efficiency=0.97)
"""The result of `calibrate(MEASURED)`."""


def transfer_seconds(objects: float, nbytes: float, link: Link, *, streams: int | None = None, model: LinkModel = CALIBRATED) -> float:
    """Return the seconds until all bytes have arrived.

    Parameters
    ----------
    objects
        The number of objects.
    nbytes
        Their bytes together.
    link
        The link.
    streams
        How many objects, or ranges of them, are moved at the same time. None: the best of 1, 2, 4, … 64.
    model
        The constants.
    """
    checked(objects, "The number of objects", most=1e12, least=1)
    checked(nbytes, "The number of bytes", most=1e24)
    if streams is None:
        widths = [1 << power for power in range(MOST_STREAMS.bit_length())]
        return min(_seconds(objects, nbytes, link, width, model) for width in widths)
    return _seconds(objects, nbytes, link, int(checked(streams, "The number of streams", most=MOST_STREAMS, least=1)), model)


def calibrate(rows: Sequence[MeasuredTransfer]) -> LinkModel:
    """Return the constants with which the largest relative error over the rows is smallest.

    The efficiency is at most 0.97, because the headers of packets of 1,500 bytes take 3% of a link.

    Parameters
    ----------
    rows
        Measured transfers.
    """
    tried = [LinkModel(millis / 1000, percent / 100) for millis in range(81) for percent in range(70, 98)]
    return min(tried, key=lambda model: max(abs(error(row, model)) for row in rows))


def error(row: MeasuredTransfer, model: LinkModel) -> float:
    """Return the relative error of the model for one measured transfer. It is positive if the model is too slow."""
    return _seconds(row.objects, row.nbytes, row.link, row.streams, model) / row.seconds - 1


def _seconds(objects: float, nbytes: float, link: Link, streams: int, model: LinkModel) -> float:
    requests = max(float(objects), nbytes / PIECE_BYTES)
    each = nbytes / requests
    width = min(float(streams), requests)
    goodput = link.rate / 8 * model.efficiency
    waiting = link.rtt + model.server_seconds
    first = link.rtt + waiting + _slow_start(each, goodput / width, link)
    sending = each / goodput
    alone = (waiting + sending) / width
    return first + (requests - width) * math.hypot(alone, sending)


def _slow_start(nbytes: float, goodput: float, link: Link) -> float:
    """Return the seconds in which a new connection moves some bytes after the first of them is sent."""
    window, seconds, sent = 10.0 * (link.mtu - _HEADERS), 0.0, 0.0
    while window < goodput * link.rtt and sent + window < nbytes:
        seconds += link.rtt
        sent += window
        window *= 2
    return seconds + (nbytes - sent) / goodput
