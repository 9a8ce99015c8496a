"""Traces of OpenTelemetry: one trace for each version, from the publisher to the engine of every member."""

from __future__ import annotations

import logging
import threading
from typing import Any

from ..errors import TelemetryUnavailable
from ..events import Event
from .trace_context import TRACEPARENT, trace_of

_MOST_OPEN = 64
"""At most this many versions are on their way. Spans of further ones are ended without a result."""
_SPANS = {"synced": ("deltawire.sync", "total_seconds"), "swapped": ("deltawire.swap", "pause_seconds"), "relayed": ("deltawire.relay", "")}
"""The events that become spans, their names, and the field with their duration."""


class OpenTelemetryTraces:
    """Makes one trace for each version. Pass it as `on_event` to the publisher, and to readers, engines, members and relays.

    A publisher begins a span when it accepts a version, as a child of the span that is active, and puts its context into the metadata of
    the commit. Every sync, swap and relay of this version becomes a child of it, wherever it happens. Readers without this listener ignore
    the context, and so do readers that find a malformed one.

    Raises `TelemetryUnavailable` if the package opentelemetry-api is missing.

    Parameters
    ----------
    tracer_provider
        The provider of OpenTelemetry. The default is the global one, which programs set up by `opentelemetry.trace.set_tracer_provider`.
    """

    def __init__(self, tracer_provider: Any = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise TelemetryUnavailable(
                "traces need the package opentelemetry-api, which deltawire's extra `traces` installs.",
                hint="Run `pip install opentelemetry-sdk`.",
            ) from None
        self._trace: Any = trace
        self._tracer: Any = trace.get_tracer("deltawire", tracer_provider=tracer_provider)
        self._propagator: Any = TraceContextTextMapPropagator()
        self._open: dict[str, Any] = {}
        self._lock = threading.Lock()

    def begin_version(self, step: int | None) -> str | None:
        """Begin the span of a version that a publisher has accepted, and return its context. None if nothing is traced.

        Parameters
        ----------
        step
            The step of the version.
        """
        try:
            attributes = {} if step is None else {"deltawire.step": step}
            span = self._tracer.start_span("deltawire.publish", kind=self._trace.SpanKind.PRODUCER, attributes=attributes)
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier, context=self._trace.set_span_in_context(span))
        except Exception:
            logging.getLogger("deltawire").exception("no trace could be begun")
            return None
        context = trace_of(carrier)
        if context is not None:
            with self._lock:
                forgotten = self._open.pop(next(iter(self._open))) if len(self._open) >= _MOST_OPEN else None
                self._open[context] = span
            if forgotten is not None:
                forgotten.end()
        return context

    def __call__(self, event: Event) -> None:
        """Make a span of an event, or end one.

        Parameters
        ----------
        event
            The event.
        """
        context = trace_of({TRACEPARENT: str(event.fields.get("trace"))})
        if event.name == "fenced":
            self._end_all(event)
        elif context is not None and event.name in ("published", "publish-failed", "superseded"):
            self._end(context, event)
        elif context is not None and event.name in _SPANS:
            name, duration = _SPANS[event.name]
            seconds = event.fields.get(duration) or 0.0
            began = event.time - (max(0.0, seconds) if isinstance(seconds, (int, float)) else 0.0)
            parent = self._propagator.extract({TRACEPARENT: context})
            kind = self._trace.SpanKind.CONSUMER
            span = self._tracer.start_span(name, context=parent, kind=kind, attributes=_attributes(event), start_time=_nanoseconds(began))
            span.end(_nanoseconds(event.time))

    def _end(self, context: str, event: Event) -> None:
        with self._lock:
            span = self._open.pop(context, None)
        if span is not None:
            span.set_attributes(_attributes(event))
            if event.name != "published":
                span.set_status(self._trace.StatusCode.ERROR, str(event.fields.get("reason") or event.name))
            span.end(_nanoseconds(event.time))

    def _end_all(self, event: Event) -> None:
        with self._lock:
            contexts = list(self._open)
        for context in contexts:
            self._end(context, event)


def _attributes(event: Event) -> dict[str, Any]:
    return {f"deltawire.{name}": value for name, value in event.fields.items() if value is not None and name != "trace"}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
