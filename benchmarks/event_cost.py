"""Measure what events, metrics and traces cost a publisher and a reader."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from chain_updates import training_run
from report import Table

import deltawire
from deltawire.events import Event, OnEvent, emit, registry

_GOAL = 0.01
"""The largest share of the time of a publish or a sync."""
_LOOPS = 20_000


@dataclass
class _Timed:
    """A listener that sums up the processor time that another one takes."""

    listener: OnEvent
    seconds: float = 0.0
    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        began = time.thread_time()
        self.listener(event)
        self.seconds += time.thread_time() - began
        self.events.append(event)

    def begin_version(self, step: int | None) -> str | None:
        begin: Callable[[int | None], str | None] | None = getattr(self.listener, "begin_version", None)
        if begin is None:
            return None
        began = time.thread_time()
        context = begin(step)
        self.seconds += time.thread_time() - began
        return context


def measure(elements: int, steps: int) -> Table:
    """Publish and sync steps of 1% changes with each listener, and compare its processor time with that of the work itself.

    Parameters
    ----------
    elements
        The number of weights.
    steps
        The number of steps.
    """
    table = Table(
        "event-cost",
        f"Cost of listeners: {2 * elements / 2**20:,.0f} MiB of bf16 weights, {steps} steps of 1% changes, through a local directory",
        ["listener", "of a publish", "of a sync", "events per publish", "events per sync"],
    )
    plain = _seconds_per_emit()
    for name, make in _listeners().items():
        published, synced = _shares(make(), elements, steps, plain)
        row = [f"{1e6 * part.cost:.0f} µs, {100 * part.share:.3f}%" for part in (published, synced)]
        table.rows.append([name, *row, f"{published.events:.1f}", f"{synced.events:.1f}"])
        table.check(f"{name}: under {100 * _GOAL:.0f}% of a publish and of a sync", max(published.share, synced.share) < _GOAL)
    table.notes.append(
        f"Processor time of the listener and of `emit` ({1e6 * plain:.1f} µs for each event), against the processor time of the work "
        f"divided by the number of cores ({_cores()}), which is the least that the work can take."
    )
    return table


def _listeners() -> dict[str, Callable[[], OnEvent]]:
    """Return functions that make the listeners whose packages are installed."""
    from deltawire.errors import TelemetryUnavailable
    from deltawire.telemetry import OpenTelemetryTraces, PrometheusMetrics

    def traces() -> OnEvent:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
        return OpenTelemetryTraces(provider)

    wanted: dict[str, Callable[[], OnEvent]] = {
        "none: the registry and the logger": lambda: _ignore,
        "`PrometheusMetrics`": PrometheusMetrics,
        "`OpenTelemetryTraces`": traces,
    }
    found = {}
    for name, make in wanted.items():
        try:
            make()
        except (TelemetryUnavailable, ImportError):
            print(f"{name} is left out: its package is not installed")
        else:
            found[name] = make
    return found


def _ignore(event: Event) -> None:
    pass


@dataclass(frozen=True)
class _Part:
    cost: float
    share: float
    events: float


def _shares(listener: OnEvent, elements: int, steps: int, plain: float) -> tuple[_Part, _Part]:
    with tempfile.TemporaryDirectory() as folder:
        publishing, reading = _Timed(listener), _Timed(listener)
        publish_costs: list[tuple[float, float, int]] = []
        sync_costs: list[tuple[float, float, int]] = []
        with (
            deltawire.Publisher(folder, attachments={}, on_event=publishing) as publisher,
            deltawire.Subscriber(folder, on_event=reading) as subscriber,
        ):
            for step, state in zip(range(steps + 1), training_run(elements, 0.01), strict=False):
                publish_costs.append(_timed(publishing, lambda state=state, step=step: publisher.publish(state, step=step)))
                sync_costs.append(_timed(reading, subscriber.sync))
    return _part(publish_costs[1:], plain), _part(sync_costs[1:], plain)  # the first version is a full checkpoint


def _timed(listener: _Timed, work: Callable[[], object]) -> tuple[float, float, int]:
    """Do the work. Return the processor seconds of the listener, those of the whole process, and the number of events."""
    listener.seconds, listener.events = 0.0, []
    began = time.process_time()
    work()
    return listener.seconds, time.process_time() - began, len(listener.events)


def _part(costs: list[tuple[float, float, int]], plain: float) -> _Part:
    each = [seconds + plain * events for seconds, _, events in costs]
    shares = [cost / (whole / _cores()) for cost, (_, whole, _) in zip(each, costs, strict=True)]
    return _Part(statistics.median(each), statistics.median(shares), statistics.mean(events for _, _, events in costs))


def _seconds_per_emit() -> float:
    """Return the processor seconds of one call of `emit` that makes an event, without those of the listener."""
    assert not registry.CHECKS, "DELTAWIRE_CHECK_EVENTS is for tests"
    fields = {"seq": 1, "updates": 1, "hops": 1, "bytes": 1}
    began = time.thread_time()
    for _ in range(_LOOPS):
        emit(_ignore, "planned", **fields)
    return (time.thread_time() - began) / _LOOPS


def _cores() -> int:
    return len(os.sched_getaffinity(0))
