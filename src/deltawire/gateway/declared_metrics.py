"""Knows the metrics that are declared in the store. A thread reads them now and then; requests ask only memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ..chain.log import ChainLog
from ..errors import DeltawireError
from ..format.records.live_records import Metric, Metrics
from ..format.records.run_records import check_same_run
from ..format.records.signing import check_signature
from ..store.live_keys import METRICS, metrics_key, parse_metrics_key

_EVERY_SECONDS = 10.0


class DeclaredMetrics:
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
            numbers = [parse_metrics_key(info.key) for info in self._log.store.list(METRICS)]
            newest = max((number for number in numbers if number is not None), default=None)
            if newest is None:
                return
            key = metrics_key(newest)
            data = self._log.object(key)
            if data is None:
                return
            found = Metrics.parse(data)
            check_same_run(found.id, self._log.run, key)
            check_signature(found, self._log.trusted_keys)
        except DeltawireError:
            return
        self._now = {metric.name: metric for metric in found.metrics}

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self.look()
