"""Metrics for Prometheus."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from .. import __version__
from ..addresses import naming_address
from ..errors import TelemetryUnavailable
from ..events import Event, printable
from ..events.registry import REGISTRY
from .metric import Change, Metric
from .metric_table import EVENTS, METRICS

LOOPBACK = "127.0.0.1"
_MOST_SERIES = 1024
"""A metric has at most this many combinations of labels. Names of members come from the store, so there might be any number."""
_LONGEST_LABEL = 128
_OTHER = "other"


class PrometheusMetrics:
    """Counts events as metrics of Prometheus, and answers `GET /metrics` if it has a port. Pass it as `on_event`.

    docs/monitoring.md lists the metrics. Close it, or use it as a context, to give the port back.

    Raises `TelemetryUnavailable` if the package prometheus_client is missing, or if the port cannot be used.

    Parameters
    ----------
    port
        Listen on this port. 0 means any free port, which `port` then tells. With None there is no route: use `registry`.
    host
        Listen at this address. By default only programs of this machine can connect. Everybody who can connect can read the metrics.
    member
        The value of the label `member` for events that do not name a member.
    registry
        Put the metrics into this registry of prometheus_client, such as `prometheus_client.REGISTRY`, which your program serves already.
        By default they get a new one. Two of these objects cannot share one.
    """

    def __init__(self, port: int | None = None, *, host: str = LOOPBACK, member: str = "", registry: Any = None) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise TelemetryUnavailable(
                "metrics need the package prometheus_client, which deltawire's extra `prometheus` installs.",
                hint="Run `pip install prometheus_client`.",
            ) from None
        self.registry = prometheus_client.CollectorRegistry() if registry is None else registry
        """The registry of prometheus_client that has the metrics."""
        self.port: int | None = None
        """The port that `/metrics` is answered on, or None."""
        self._member = member
        self._lock = threading.Lock()
        self._series: dict[str, dict[tuple[str, ...], Any]] = defaultdict(dict)
        self._changes: dict[str, list[tuple[Metric, Change, Any]]] = defaultdict(list)
        self._events = self._collector(prometheus_client, EVENTS)
        for metric in METRICS.values():
            collector = self._collector(prometheus_client, metric)
            for change in metric.changes:
                self._changes[change.event].append((metric, change, collector))
        build = prometheus_client.Gauge("deltawire_build_info", "The release of deltawire.", ["version"], registry=self.registry)
        build.labels(__version__).set(1)
        self._server: Any = None
        self._thread: threading.Thread | None = None
        if port is not None:
            self._listen(prometheus_client, host, port)

    def __call__(self, event: Event) -> None:
        """Count an event.

        Parameters
        ----------
        event
            The event.
        """
        kind = REGISTRY.get(event.name)
        self._labelled(self._events, EVENTS, (event.name, kind.level if kind is not None else "info")).inc()
        for metric, change, collector in self._changes.get(event.name, ()):
            value = change.value(event)
            if value is None:
                continue
            labels = change.labels(event.fields)
            if "member" in metric.labels:
                labels = (str(event.fields.get("member") or self._member), *labels)
            child = self._labelled(collector, metric, labels)
            if metric.type == "gauge":
                child.set(value)
            elif metric.type == "histogram":
                child.observe(value)
            elif value > 0:
                child.inc(value)

    def close(self) -> None:
        """Stop answering requests. The metrics stay in the registry."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            assert self._thread is not None
            self._thread.join()
            self._server = self._thread = self.port = None

    def __enter__(self) -> PrometheusMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collector(self, prometheus_client: Any, metric: Metric) -> Any:
        made = {"gauge": prometheus_client.Gauge, "counter": prometheus_client.Counter, "histogram": prometheus_client.Histogram}
        options = {"buckets": metric.buckets} if metric.type == "histogram" else {}
        if metric.type == "gauge" and not metric.labels:
            return _Gauge(prometheus_client.Gauge(metric.name, metric.meaning, registry=None), self.registry)
        return made[metric.type](metric.name, metric.meaning, metric.labels, registry=self.registry, **options)

    def _labelled(self, collector: Any, metric: Metric, labels: tuple[str, ...]) -> Any:
        """Return the series of these labels. Long labels are cut. When there are too many series, new ones are "other" or old ones end."""
        if not labels:
            return collector
        known = self._series[metric.name]
        if (found := known.get(labels)) is not None:
            return found
        with self._lock:
            labels = tuple(printable(label[:_LONGEST_LABEL]) for label in labels)
            if labels not in known and len(known) >= _MOST_SERIES:
                if metric.forgets:
                    oldest = next(iter(known))
                    del known[oldest]
                    collector.remove(*oldest)
                else:
                    labels = tuple(_OTHER for _ in labels)
            return known.setdefault(labels, collector.labels(*labels))

    def _listen(self, prometheus_client: Any, host: str, port: int) -> None:
        with naming_address("metrics", host, port, TelemetryUnavailable):
            self._server, self._thread = prometheus_client.start_http_server(port, host, self.registry)
        self.port = int(self._server.server_address[1])


class _Gauge:
    """A gauge without labels that has no value until it is set. With 0, a relay would seem to have published version 0 in 1970."""

    def __init__(self, gauge: Any, registry: Any) -> None:
        self._gauge = gauge
        self._is_set = False
        registry.register(self)

    def set(self, value: float) -> None:
        self._gauge.set(value)
        self._is_set = True

    def describe(self) -> Any:
        return self._gauge.describe()

    def collect(self) -> Any:
        return self._gauge.collect() if self._is_set else self._gauge.describe()
