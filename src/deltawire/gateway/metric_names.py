"""Notices feedback for metrics that nobody declared, such as one whose name has a typing error: no trainer reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import RequestMalformed
from ..events import OnEvent, emit
from ..format.records.live_records import Metric

_MOST_TOLD = 100
"""Events tell at most this many names, because callers choose them."""
_MOST_LISTED = 20


class MetricNames:
    """Compares the names in feedback with the declared metrics. Use it from one event loop.

    Parameters
    ----------
    metrics
        Returns the declared metrics by name.
    is_strict
        Whether feedback for other metrics is refused.
    on_event
        Called with "metric-undeclared", once for each name.
    """

    def __init__(self, metrics: Callable[[], Mapping[str, Metric]], *, is_strict: bool = False, on_event: OnEvent | None = None) -> None:
        self._metrics, self._is_strict = metrics, is_strict
        self._on_event = on_event
        self._told: set[str] = set()

    def is_undeclared(self, name: str) -> bool:
        """Return whether metrics are declared and this one is not. Raises `RequestMalformed` if it is to be refused.

        While no metric is declared, no name is wrong, except for a gateway that refuses them all.
        """
        declared = self._metrics()
        if name in declared:
            return False
        if self._is_strict:
            raise RequestMalformed(f"the metric {name[:80]!r} is not declared; {_listed(declared)}.")
        if declared and name not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(name)
            emit(self._on_event, "metric-undeclared", metric=name)
        return bool(declared)


def _listed(declared: Mapping[str, Metric]) -> str:
    if not declared:
        return "no metric is declared yet"
    more = len(declared) - _MOST_LISTED
    names = ", ".join(repr(name[:80]) for name in sorted(declared)[:_MOST_LISTED])
    return f"declared are {names}{f' and {more:,} others' if more > 0 else ''}"
