"""Reads which metrics are declared for a run."""

from __future__ import annotations

from ..chain.log import ChainLog
from ..errors import CorruptRecord, DataMissing
from ..format.records.live_records import Metric, Metrics
from ..format.records.run_records import check_same_run
from ..format.records.signing import check_signature
from ..store import live_keys


def declared_metrics(log: ChainLog) -> tuple[Metric, ...]:
    """Return the metrics of the declaration with the highest number, or none if there is no declaration.

    Raises `CorruptRecord`, and `SignatureInvalid` if the log trusts keys of which none signed the declaration.

    Parameters
    ----------
    log
        The chain.
    """
    newest = None
    for info in log.store.list(live_keys.METRICS):
        if live_keys.parse_metrics_key(info.key) is not None:
            newest = info.key
    if newest is None:
        return ()
    data = log.object(newest)
    if data is None:
        raise DataMissing(f"{newest} was listed in {log.store.url}, but cannot be read.")
    record = Metrics.parse(data)
    check_same_run(record.id, log.run, newest)
    if live_keys.metrics_key(record.number) != newest:
        raise CorruptRecord(f"{newest} in {log.store.url} holds {record.describe()}.")
    check_signature(record, log.trusted_keys)
    return record.metrics
