"""Events become metrics of Prometheus, whatever the events say."""

from __future__ import annotations

import math
import socket
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
from support import publisher_arguments

from deltawire import Publisher, Subscriber
from deltawire.errors import TelemetryUnavailable
from deltawire.events import Event
from deltawire.events.registry import REGISTRY
from deltawire.store.memory import MemoryStore
from deltawire.telemetry import PrometheusMetrics
from deltawire.telemetry.metric_table import EVENTS, METRICS

prometheus_client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
parser = pytest.importorskip("prometheus_client.parser")


def scraped(metrics: PrometheusMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample that the route answers with."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics") as answer:
        text = answer.read().decode()
    samples = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def value(samples: dict[tuple[str, tuple[tuple[str, str], ...]], float], name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_a_publisher_and_a_reader_are_seen_through_the_route():
    store = MemoryStore()
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal(5000).astype(np.float16)}
    with PrometheusMetrics(0, member="reader-1") as metrics:
        with Publisher(store, on_event=metrics, **publisher_arguments()) as publisher, Subscriber(store, on_event=metrics) as subscriber:
            publisher.publish(weights, step=0)
            subscriber.sync()
            weights["w"][:10] += np.float16(1)
            version = publisher.publish(weights, step=1)
            subscriber.sync()
        samples = scraped(metrics)
    assert value(samples, "deltawire_published_version") == 2
    assert value(samples, "deltawire_applied_version", member="reader-1") == 2
    assert value(samples, "deltawire_version_lag", member="reader-1") == 0
    assert value(samples, "deltawire_state_bytes") == 10_000
    assert value(samples, "deltawire_delta_bytes") == version.bytes
    assert value(samples, "deltawire_changed_weights") == 10
    assert value(samples, "deltawire_bits_per_change") == 8 * version.bytes / 10
    assert value(samples, "deltawire_publish_seconds_count", phase="encode") == 2
    assert value(samples, "deltawire_sync_seconds_count", phase="total") == 2
    assert value(samples, "deltawire_events_total", event="synced", level="info") == 2
    assert value(samples, "deltawire_digest_mismatch_total") == 0
    uploaded = value(samples, "deltawire_published_bytes_total", kind="anchor") + version.bytes
    assert value(samples, "deltawire_fetched_bytes_total", source="store") == uploaded


def test_every_metric_is_there_under_its_documented_name():
    metrics = PrometheusMetrics()
    families = {family.name for family in metrics.registry.collect()}
    assert families == {metric.name for metric in [*METRICS.values(), EVENTS]} | {"deltawire_build_info"}
    text = prometheus_client.generate_latest(metrics.registry).decode()
    assert all(f"# HELP {name} " in text for name in METRICS)


def test_pauses_are_counted_from_a_millisecond_on():
    metrics = PrometheusMetrics()
    metrics(Event("swapped", {"engine": "vllm", "pause_seconds": 0.0008, "updates": 1}))
    bounds = [
        sample.labels["le"]
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "deltawire_pause_seconds_bucket" and sample.value == 1
    ]
    assert bounds[0] == "0.001"


def test_an_engine_leaves_quarantine():
    metrics = PrometheusMetrics(member="m")
    for event, expected in (("engine-quarantined", 1), ("swap-failed", 1), ("repaired", 0)):
        metrics(Event(event, {"error": "E"}))
        assert metrics.registry.get_sample_value("deltawire_engine_quarantined", {"member": "m"}) == expected


def test_events_with_values_of_any_kind_do_no_harm():
    metrics = PrometheusMetrics()
    for name, kind in REGISTRY.items():
        for wrong in (None, "text", math.nan, math.inf, -1, 10**400, True):
            metrics(Event(name, {field.name: wrong for field in kind.fields}))
    metrics(Event("no-such-event"))
    assert prometheus_client.generate_latest(metrics.registry)


def test_names_from_the_store_are_bounded():
    metrics = PrometheusMetrics()
    for number in range(3000):
        metrics(Event("generated", {"member": f"member-{number}", "tokens": 1}))
    metrics(Event("generated", {"member": "x" * 100_000 + "\n\x1b", "tokens": 1}))
    (family,) = [family for family in metrics.registry.collect() if family.name == "deltawire_generated_tokens"]
    totals = {sample.labels["member"]: sample.value for sample in family.samples if sample.name.endswith("_total")}
    assert len(totals) == 1025
    assert totals["other"] == 3001 - 1024
    assert max(map(len, totals)) <= 128


def test_answers_of_the_newest_versions_are_counted_however_long_a_run_is():
    metrics = PrometheusMetrics()
    for seq in range(3000):
        metrics(Event("answered", {"route": "chat", "engine": "e", "channel": "stable", "seq": seq, "seconds": 0.1}))
    (family,) = [family for family in metrics.registry.collect() if family.name == "deltawire_gateway_version_answers"]
    counted = {int(sample.labels["seq"]) for sample in family.samples if sample.name.endswith("_total")}
    assert counted == set(range(3000 - 1024, 3000))


def test_promotions_rollbacks_and_the_evidence_of_a_gate_are_metrics():
    metrics = PrometheusMetrics()
    for move, (kind, seq) in enumerate([("promote", 3), ("promote", 5), ("rollback", 3)]):
        metrics(Event("channel-moved", {"channel": "stable", "move": move, "kind": kind, "seq": seq, "share": None, "why": ""}))
    found = {"limit": "solved:-0.01", "verdict": "broken", "canary": 0.2, "stable": 0.4, "blocks": 9}
    metrics(Event("gate-limit", {**found, "low": -0.3, "high": -0.05, "threshold": -0.01}))

    def value_of(name, **labels):
        return metrics.registry.get_sample_value(name, labels)

    assert value_of("deltawire_channel_moves_total", channel="stable", kind="promote") == 2
    assert value_of("deltawire_channel_moves_total", channel="stable", kind="rollback") == 1
    assert value_of("deltawire_channel_commit", channel="stable") == 3
    assert value_of("deltawire_gate_limit_verdict", limit="solved:-0.01") == -1
    bounds = [value_of("deltawire_gate_limit_difference", limit="solved:-0.01", bound=bound) for bound in ("low", "high", "threshold")]
    assert bounds == [-0.3, -0.05, -0.01]


def test_the_route_is_on_loopback_and_ends_with_the_object():
    metrics = PrometheusMetrics(0)
    assert metrics._server.server_address[0] == "127.0.0.1"
    port = metrics.port
    metrics.close()
    metrics.close()
    assert metrics.port is None
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


def test_a_port_that_is_taken_is_a_named_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(TelemetryUnavailable, match="Choose another port"):
            PrometheusMetrics(taken.getsockname()[1])


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(TelemetryUnavailable, match="pip install prometheus_client"):
        PrometheusMetrics()


def test_a_program_can_serve_them_with_its_own_metrics():
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("own_metric", "A metric of the program.", registry=registry)
    PrometheusMetrics(registry=registry)
    assert {"own_metric", "deltawire_fenced"} <= {family.name for family in registry.collect()}


def test_a_gauge_has_no_value_before_its_first_event():
    with PrometheusMetrics(0) as metrics:
        names = {name for name, _ in scraped(metrics)}
        assert not names & {metric.name for metric in METRICS.values() if metric.type == "gauge"}
        assert "deltawire_rollbacks_total" in names
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics") as answer:
            assert b"# TYPE deltawire_published_version gauge" in answer.read()
        with pytest.raises(ValueError, match="Duplicated"):
            PrometheusMetrics(registry=metrics.registry)
