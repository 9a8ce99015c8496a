"""The context of a version's trace, which travels in the metadata of its commit (docs/protocol.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

from ..events import Listeners, OnEvent

TRACEPARENT = "traceparent"
"""The name in the metadata of a commit."""
_FORM = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@runtime_checkable
class BeginsTraces(Protocol):
    """A listener that traces versions."""

    def begin_version(self, step: int | None) -> str | None:
        """Begin the trace of a version, and return its context in the form of W3C's traceparent."""


def trace_of(meta: Mapping[str, str]) -> str | None:
    """Return the context in the metadata of a commit. Anything else than a context of version 00 counts as none.

    Parameters
    ----------
    meta
        The metadata, which anybody may have written.
    """
    found = meta.get(TRACEPARENT)
    return found if isinstance(found, str) and _FORM.fullmatch(found) else None


def traced(meta: Mapping[str, str]) -> dict[str, str]:
    """Return the context as the field `trace` of an event, or no field.

    Parameters
    ----------
    meta
        The metadata of a commit.
    """
    found = trace_of(meta)
    return {} if found is None else {"trace": found}


def with_trace(meta: dict[str, str], on_event: OnEvent | None, step: int | None) -> dict[str, str]:
    """Return the metadata of a new version, with a context if a listener traces versions. An existing context stays.

    Parameters
    ----------
    meta
        The user's metadata.
    on_event
        The listener of the publisher.
    step
        The step of the version.
    """
    if TRACEPARENT not in meta:
        for listener in _tracing(on_event):
            if (context := listener.begin_version(step)) is not None:
                return {**meta, TRACEPARENT: context}
    return meta


def _tracing(on_event: OnEvent | None) -> Iterator[BeginsTraces]:
    if isinstance(on_event, Listeners):
        for each in on_event.listeners:
            yield from _tracing(each)
    elif isinstance(on_event, BeginsTraces):
        yield on_event
