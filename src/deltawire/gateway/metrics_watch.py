"""Knows the metrics that are declared in the store. A thread reads them now and then; requests ask only memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ..chain.log import ChainLog
from ..errors import DeltawireError
from ..format.records.live_records import Metric
from ..live.declared_metrics import declared_metrics

_EVERY_SECONDS = 10.0


class MetricsWatch:
    """The metrics of a run, as they were at the last look.

    Parameters
    ----------
    log
        The chain. Only the thread of this object uses it.
    """

    def __init__(self, log: ChainLog) -> None:
        self._log = log
        self._now: Mapping[str, Metric] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deltawire-metrics", daemon=True)

    def __call__(self) -> Mapping[str, Metric]:
        """Return the metrics by name."""
        return self._now

    def start(self) -> None:
        """Read the metrics, and begin to look for changes."""
        self.look()
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()

    def look(self) -> None:
        """Read the newest declaration. If it cannot be read, the metrics stay as they were."""
        try:
            self._now = {metric.name: metric for metric in declared_metrics(self._log)}
        except DeltawireError:
            return

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self.look()
