"""Declares metrics, and reads the declaration in force (docs/protocol.md §13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import NoMetrics
from ...events import OnEvent, emit
from ...fleet.fleet_keyring import FleetKeyring
from ...fleet.steps.record_steps import parsed_answer
from ...fleet.steps.requests import MOST_TOGETHER, Steps, Together
from ...format.records.canonical import MAX_RECORD_BYTES
from ...format.records.live_records import Metric, Metrics
from ...store import live_keys
from ...store.base import ObjectInfo
from ...store.create_rule import create_steps
from ...store.requests import Get, List


def read_metrics(run: str, keyring: FleetKeyring) -> Steps[tuple[Metrics | None, int]]:
    """Return the declaration in force, and the first number that is free. Records that are not trusted only take up their number.

    Parameters
    ----------
    run
        The run's id.
    keyring
        Checks signatures.
    """
    listed: list[ObjectInfo] = yield List(live_keys.METRICS)
    numbers = sorted((number for info in listed if (number := live_keys.parse_metrics_key(info.key)) is not None), reverse=True)
    for start in range(0, len(numbers), MOST_TOGETHER):
        group = numbers[start : start + MOST_TOGETHER]
        answers = yield Together(tuple(Get(live_keys.metrics_key(number), MAX_RECORD_BYTES) for number in group))
        for number, answer in zip(group, answers, strict=True):
            record = parsed_answer(Metrics.parse, answer)
            if record is not None and (record.id, record.number) == (run, number) and keyring.trusts(record):
                return record, numbers[0] + 1
    return None, numbers[0] + 1 if numbers else 0


def declare_metrics(
    run: str,
    metrics: Sequence[Metric] | None,
    keyring: FleetKeyring,
    draw_nonce: Callable[[], str],
    clock: Callable[[], int],
    *,
    on_event: OnEvent | None = None,
) -> Steps[Metrics]:
    """Return the declaration in force, after these metrics were declared if it differs from them. Raises `NoMetrics` if there is none.

    Parameters
    ----------
    run
        The run's id.
    metrics
        The metrics; None takes those in force.
    keyring
        Signs the declaration, and checks the signatures of others.
    draw_nonce
        Returns 32 random hexadecimal digits.
    clock
        Returns milliseconds since 1970, for people.
    on_event
        Called with "metrics-replaced" if another declaration was in force.
    """
    while True:
        found, number = yield from read_metrics(run, keyring)
        if metrics is None:
            if found is None:
                raise NoMetrics(f"run {run} declares no metrics.")
            return found
        if found is not None and found.metrics == tuple(metrics):
            return found
        record = keyring.sign(Metrics(run, number, draw_nonce(), tuple(metrics), clock()))
        raw = record.to_bytes()
        if (yield from create_steps(live_keys.metrics_key(number), raw)) == raw:
            if found is not None:
                emit(on_event, "metrics-replaced", before=_names(found.metrics), after=_names(metrics))
            return record


def _names(metrics: Sequence[Metric]) -> str:
    return ", ".join(each.name for each in metrics)
