"""The option that serves metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from ...events import Event, OnEvent


def read_address(text: str | None) -> str | None:
    """Return the text unchanged. A text that is neither PORT nor HOST:PORT is wrong usage."""
    if text is not None and _parsed(text) is None:
        raise typer.BadParameter(f"{text[:64]!r} is not an address. Write a port, such as 9464, or HOST:PORT, such as 0.0.0.0:9464.")
    return text


def _parsed(text: str) -> tuple[str | None, int] | None:
    host, separator, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and len(port) < 6 and int(port) < 65536 and bool(host) == bool(separator)):
        return None
    return host.removeprefix("[").removesuffix("]") or None, int(port)


MetricsOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[HOST:]PORT",
        help="Answer GET /metrics for Prometheus here. Without a host only this machine can connect.",
        show_default=False,
        callback=read_address,
    ),
]


@contextmanager
def counted(address: str | None, listener: OnEvent, member: str | None = None) -> Iterator[OnEvent]:
    """Serve metrics inside the context, and yield a listener that counts events and passes them on.

    Parameters
    ----------
    address
        The value of --metrics. Without one, the listener itself is yielded.
    listener
        Gets all events.
    member
        The label `member` of events that name none.
    """
    if address is None:
        yield listener
        return
    from ...telemetry import PrometheusMetrics
    from ...telemetry.prometheus import LOOPBACK

    parsed = _parsed(address)
    assert parsed is not None
    host, port = parsed
    with PrometheusMetrics(port, host=host or LOOPBACK, member=member or "") as metrics:

        def count_and_pass_on(event: Event) -> None:
            try:
                metrics(event)  # first, so that the metrics include what the command has printed
            finally:
                listener(event)

        yield count_and_pass_on
