"""Lines on stderr about events that several commands report alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .terminal import print_notice, print_trace

if TYPE_CHECKING:
    from ...events import Event


def print_if_verbose(event: Event, verbose: bool) -> None:
    """Print an event with all its fields if `verbose` is true."""
    if verbose:
        print_trace(" ".join([event.name, *(f"{name}={_short(value)}" for name, value in event.fields.items())]))


def _short(value: object) -> object:
    """Return a value for people: numbers with up to four digits after the first ones that are not 0."""
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:.0f}" if isinstance(value, float) else value


def print_if_waiting(event: Event, reported: set[str]) -> None:
    """Print that the command waits for an object, once per object. `reported` holds the keys of those that were printed."""
    if event.name == "retrying" and event.fields.get("reason") == "missing":
        key = str(event.fields["key"])
        if key not in reported:
            reported.add(key)
            print_notice(f"waiting for {key}, which is not in the store yet")


def notice_of(event: Event) -> str | None:
    """Return a notice about a copy of the chain that is not read, or a file that is not shared. None for other events."""
    fields = event.fields
    match event.name:
        case "relay-avoided":
            return f"{fields['relay']} is not read for {fields['seconds']:.0f} s: {fields['reason']}"
        case "relay-late":
            return f"{fields['relay']} lags behind, so the origin is read: {fields['reason']}"
        case "not-shared":
            return f"a file is not shared through the host cache: {fields['reason']}"
    return None


def print_if_not_shared(event: Event, reported: set[str]) -> None:
    """Print that a file is not shared with other processes of the host, once for each reason. `reported` holds the notices so far."""
    notice = notice_of(event) if event.name == "not-shared" else None
    if notice is not None and notice not in reported:
        reported.add(notice)
        print_notice(notice)
