"""Listeners that pass events on to other systems: Prometheus, trackers of experiments, traces.

    metric.py          `Metric`, `Change`: how events change a metric
    metric_table.py    `METRICS`: every metric
    live_metrics.py    those of channels, gates and gateways
    prometheus.py      `PrometheusMetrics`: the metrics, with a route `/metrics`
    trackers.py        `TrackioLogger`, `WandbLogger` and `TensorBoardLogger`
    trace_context.py   the context of a version's trace, in the metadata of its commit
    traces.py          `OpenTelemetryTraces`: one trace for each version

Each of them needs a package that is an extra of deltawire, which is imported when it is used.
"""

from .prometheus import PrometheusMetrics
from .traces import OpenTelemetryTraces
from .trackers import TensorBoardLogger, TrackioLogger, WandbLogger

__all__ = ["OpenTelemetryTraces", "PrometheusMetrics", "TensorBoardLogger", "TrackioLogger", "WandbLogger"]
