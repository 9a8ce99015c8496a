"""The time to move objects over a link with a rate and a round-trip time, in several streams. Pure.

A stream asks for an object, waits one round trip and the server's time, and receives it. The first object of each stream comes in the slow
start of TCP: ten segments in the first round trip, and twice as many in each that follows, up to the stream's share of the rate. After that
waiting or the rate bounds all streams together, whichever is slower. A reader that has not used the link yet also connects, and begins with
few streams, whose number doubles in each round (`store.streams.stream_ramp`). Two constants are fitted to measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UnusablePlan
from ..store.streams.stream_limit import FIRST_STREAMS
from ..store.streams.stream_ramp import first_width
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
        The share of a link's rate that arrives as useful bytes, if the link has no delay.
    fade
        How much slower a link is for each second of its round trip: streams that lose packets need longer to recover.
    """

    server_seconds: float
    efficiency: float
    fade: float = 0.0

    def __post_init__(self) -> None:
        checked(self.server_seconds, "The seconds of the server for a request", most=60)
        checked(self.efficiency, "The share of a link's rate that arrives", most=1, least=0.01)
        checked(self.fade, "The loss of rate for each second of a round trip", most=1000)

    def goodput(self, link: Link) -> float:
        """Return the useful bytes per second of a link.

        Parameters
        ----------
        link
            The link.
        """
        return link.rate / 8 * self.efficiency / (1 + self.fade * link.rtt)


@dataclass(frozen=True, slots=True)
class MeasuredTransfer:
    """A transfer that was measured: this many objects and bytes in all, over a new link, took so many seconds.

    `streams` is their fixed number, or None if the reader chose it.
    """

    objects: int
    nbytes: float
    link: Link
    streams: int | None
    seconds: float


_EMULATED = Link(1e9, 0.080, 9000)

MEASURED = (
    MeasuredTransfer(64, 64 * 1.16e6, _EMULATED, 1, 8.3),
    MeasuredTransfer(64, 64 * 1.16e6, _EMULATED, 4, 2.2),
    MeasuredTransfer(64, 64 * 1.16e6, _EMULATED, 8, 1.6),
    MeasuredTransfer(64, 64 * 1.16e6, _EMULATED, 16, 0.965),
    MeasuredTransfer(64, 64 * 1.16e6, _EMULATED, 32, 0.855),
    *[
        MeasuredTransfer(8, 8 * 2.0**28, Link(rate, rtt, 9000), None, seconds)
        for rate, seconds_by_rtt in {0.25e9: (72.50, 74.87, 78.35), 0.5e9: (39.01, 41.72, 46.43)}.items()
        for rtt, seconds in zip((0.030, 0.080, 0.150), seconds_by_rtt, strict=True)
    ],
)
"""Emulated links, SeaweedFS as the S3 server, TCP with BBR, on busy cores. The first rows are the middle of runs, which differed by up to
34%. The others are full weights of `make bench-wan`, over links that are slow enough not to measure the cores.
"""

CALIBRATED = LinkModel(server_seconds=0.02, efficiency=0.97, fade=1.0)
"""The result of `calibrate(MEASURED)`."""


def transfer_seconds(
    objects: float, nbytes: float, link: Link, *, streams: int | None = None, is_new: bool = False, model: LinkModel = CALIBRATED
) -> float:
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
    is_new
        Whether the reader has not used the link yet. Otherwise its connections are open, and it knows how many streams are best.
    model
        The constants.
    """
    checked(objects, "The number of objects", most=1e12, least=1)
    checked(nbytes, "The number of bytes", most=1e24)
    if streams is None:
        widths = [1 << power for power in range(MOST_STREAMS.bit_length())]
        return min(
            _seconds(objects, nbytes, link, width, model, is_new=is_new) + (_growing(width, link, model) if is_new else 0.0)
            for width in widths
        )
    width = int(checked(streams, "The number of streams", most=MOST_STREAMS, least=1))
    return _seconds(objects, nbytes, link, width, model, is_new=is_new)


def calibrate(rows: Sequence[MeasuredTransfer]) -> LinkModel:
    """Return the constants with which the largest relative error over the rows is smallest.

    The efficiency is at most 0.97, because the headers of packets of 1,500 bytes take 3% of a link.

    Parameters
    ----------
    rows
        Measured transfers.
    """
    tried = [
        LinkModel(millis / 1000, percent / 100, tenths / 10)
        for millis in range(0, 61, 5)
        for percent in range(85, 98, 2)
        for tenths in range(0, 21, 2)
    ]
    return min(tried, key=lambda model: max(abs(error(row, model)) for row in rows))


def error(row: MeasuredTransfer, model: LinkModel) -> float:
    """Return the relative error of the model for one measured transfer. It is positive if the model is too slow."""
    return transfer_seconds(row.objects, row.nbytes, row.link, streams=row.streams, is_new=True, model=model) / row.seconds - 1


def _growing(width: int, link: Link, model: LinkModel) -> float:
    """Return the seconds until so many streams have begun on a link that was not used yet. Their number doubles in each round."""
    waiting = link.rtt + model.server_seconds
    return waiting * max(0.0, math.log2(width / first_width(waiting, FIRST_STREAMS, MOST_STREAMS)))


def _seconds(objects: float, nbytes: float, link: Link, streams: int, model: LinkModel, *, is_new: bool) -> float:
    requests = max(float(objects), nbytes / PIECE_BYTES)
    each = nbytes / requests
    width = min(float(streams), requests)
    goodput = model.goodput(link)
    waiting = link.rtt + model.server_seconds
    first = (link.rtt if is_new else 0.0) + waiting + _slow_start(each, goodput / width, link)
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
