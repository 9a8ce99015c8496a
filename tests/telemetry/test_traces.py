"""One trace leads from the publisher of a version to every member's swap, whatever stands in the metadata of commits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import publisher_arguments

from deltawire import Publisher, Subscriber
from deltawire.chain.version import Version
from deltawire.engines.base import KvCache
from deltawire.engines.swap.swap_controller import SwapController
from deltawire.errors import Fenced, StoreDenied, TelemetryUnavailable
from deltawire.events import Event, tell_all
from deltawire.relay import Relay
from deltawire.store.memory import MemoryStore
from deltawire.telemetry import OpenTelemetryTraces
from deltawire.telemetry.trace_context import trace_of

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
sampling = pytest.importorskip("opentelemetry.sdk.trace.sampling")

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WEIGHTS = {"w": np.arange(1000, dtype=np.float16)}


class Traced:
    """A listener with the spans that it has made."""

    def __init__(self, **options: Any) -> None:
        self._exporter = in_memory.InMemorySpanExporter()
        self.provider = sdk.TracerProvider(**options)
        self.provider.add_span_processor(export.SimpleSpanProcessor(self._exporter))
        self.listener = OpenTelemetryTraces(self.provider)

    @property
    def spans(self) -> list[Any]:
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.provider.shutdown()


def swap(version: Version, listener: Any) -> None:
    """Swap a version into an engine that does nothing."""

    class Engine:
        name = "engine"

        def pause(self, kv_cache: Any) -> None: ...

        def resume(self) -> None: ...

    class Prepared:
        def apply(self) -> None: ...

        def confirm(self, full: bool) -> None: ...

        def revert(self) -> None: ...

    SwapController(Engine(), kv_cache=KvCache.DROP, on_event=listener).swap(Prepared(), version)  # type: ignore[arg-type]


def test_one_trace_leads_from_the_trainer_to_the_swap_of_every_member(traced: Traced) -> None:
    store, region = MemoryStore(), MemoryStore()
    tracer = traced.provider.get_tracer("trainer")
    with (
        tracer.start_as_current_span("step"),
        Publisher(store, on_event=tell_all(print, traced.listener), **publisher_arguments()) as first,
    ):
        first.publish(WEIGHTS, step=5)
    with Relay(store, region, on_event=traced.listener) as relay:
        relay.copy()
    for place in (store, region):
        with Subscriber(place, on_event=traced.listener) as subscriber:
            swap(subscriber.sync(), traced.listener)
    published, trainer, *others = traced.spans
    assert (published.name, trainer.name) == ("deltawire.publish", "step")
    assert published.parent.span_id == trainer.context.span_id
    assert published.attributes["deltawire.step"] == 5
    assert published.attributes["deltawire.kind"] == "anchor"
    assert sorted(span.name for span in others) == ["deltawire.relay", *["deltawire.swap"] * 2, *["deltawire.sync"] * 2]
    assert {span.parent.span_id for span in others} == {published.context.span_id}
    assert len({span.context.trace_id for span in traced.spans}) == 1
    assert all(span.start_time <= span.end_time for span in traced.spans)


def test_the_context_is_in_the_metadata_of_the_commit(traced: Traced) -> None:
    store = MemoryStore()
    with Publisher(store, on_event=traced.listener, **publisher_arguments()) as publisher:
        version = publisher.publish(WEIGHTS, meta={"lr": "1"})
        (span,) = traced.spans
        flags = f"{int(span.context.trace_flags):02x}"
        assert int(flags, 16) & 1, "it is sampled"
        assert version.meta == {"lr": "1", "traceparent": f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{flags}"}
        assert publisher.publish(WEIGHTS, meta={"traceparent": CONTEXT}).meta == {"traceparent": CONTEXT}
    assert len(traced.spans) == 1  # the second version belongs to the user's own trace


def test_a_version_that_is_not_published_ends_with_an_error(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    with Publisher(store, on_event=traced.listener, **publisher_arguments()) as publisher:

        def fail(*_: Any, **__: Any) -> None:
            raise StoreDenied("no permission.")

        publisher.publish(WEIGHTS)
        with monkeypatch.context() as patch:
            patch.setattr(store, "put", fail)
            patch.setattr(store, "put_if_absent", fail)
            with pytest.raises(StoreDenied):
                publisher.publish({"w": WEIGHTS["w"] + 1})
        with Publisher(store, **publisher_arguments()), pytest.raises(Fenced):
            publisher.publish({"w": WEIGHTS["w"] + 2})
    good, failed, fenced = traced.spans
    assert good.status.is_ok
    assert not failed.status.is_ok
    assert "no permission" in failed.status.description
    assert not fenced.status.is_ok
    assert traced.listener._open == {}


def test_versions_on_their_way_are_bounded(traced: Traced) -> None:
    contexts = {traced.listener.begin_version(step) for step in range(100)}
    assert len(contexts) == 100
    assert len(traced.listener._open) == 64
    assert len(traced.spans) == 36


HOSTILE = [
    "",
    "x" * 1_000_000,
    CONTEXT.upper(),
    f"{CONTEXT}-extra",
    f" {CONTEXT}",
    f"{CONTEXT}\n",
    CONTEXT.replace("00-", "01-", 1),
    f"00-{'0' * 32}-b7ad6b7169203331-01",
    f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
    "00-٠af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
]


@pytest.mark.parametrize("context", HOSTILE, ids=range(len(HOSTILE)))
def test_a_malformed_context_is_ignored(traced: Traced, context: str) -> None:
    store = MemoryStore()
    meta = {"traceparent": context[:4000]}
    with Publisher(store, **publisher_arguments()) as publisher:
        publisher.publish(WEIGHTS, meta=meta)
    seen: list[Event] = []
    with Subscriber(store, on_event=tell_all(seen.append, traced.listener)) as subscriber:
        assert subscriber.sync().meta == meta
    assert [event.fields.get("trace") for event in seen if event.name == "synced"] == [None]
    traced.listener(Event("synced", {"trace": context}))
    assert traced.spans == []
    assert trace_of({"traceparent": context}) is None
    assert trace_of({"traceparent": 5}) is None  # type: ignore[dict-item]


def test_numbers_that_are_none_do_no_harm(traced: Traced) -> None:
    for seconds in (None, "text", -5.0):
        traced.listener(Event("swapped", {"trace": CONTEXT, "pause_seconds": seconds}, time=100.0))
    assert [(span.start_time, span.end_time) for span in traced.spans] == [(100 * 10**9, 100 * 10**9)] * 3


def test_what_is_not_sampled_is_not_recorded_anywhere() -> None:
    trainer, member, store = Traced(sampler=sampling.ALWAYS_OFF), Traced(), MemoryStore()
    with Publisher(store, on_event=trainer.listener, **publisher_arguments()) as publisher:
        assert int(publisher.publish(WEIGHTS).meta["traceparent"][-2:], 16) & 1 == 0
    with Subscriber(store, on_event=member.listener) as subscriber:
        subscriber.sync()
    assert trainer.spans == member.spans == []


def test_without_an_sdk_nothing_is_traced() -> None:
    store = MemoryStore()
    with Publisher(store, on_event=OpenTelemetryTraces(), **publisher_arguments()) as publisher:
        assert publisher.publish(WEIGHTS).meta == {}


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(TelemetryUnavailable, match="pip install opentelemetry-sdk"):
        OpenTelemetryTraces()


def test_a_background_publisher_traces_what_it_leaves_out(traced: Traced) -> None:
    store, gate = MemoryStore(), threading.Event()

    def wait(event: Event) -> None:
        if event.name == "published":
            gate.wait()

    with Publisher(store, background=True, on_event=tell_all(traced.listener, wait), **publisher_arguments()) as publisher:
        publisher.publish(WEIGHTS, step=0)
        publisher.publish(WEIGHTS, step=1)
        publisher.publish(WEIGHTS, step=2)
        gate.set()
    left_out = [span for span in traced.spans if not span.status.is_ok]
    assert {span.status.description for span in left_out} <= {"superseded"}
    assert len(traced.spans) == 3
