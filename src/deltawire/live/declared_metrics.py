"""Reads which metrics are declared for a run."""

from __future__ import annotations

from ..chain.log import ChainLog
from ..fleet.fleet_keyring import FleetKeyring
from ..fleet.steps.requests import run_steps
from ..format.records.live_records import Metric
from .steps.metric_steps import read_metrics


def declared_metrics(log: ChainLog) -> tuple[Metric, ...]:
    """Return the metrics of the declaration in force, or none if there is no declaration.

    A declaration that none of the log's trusted keys signed does not count.

    Parameters
    ----------
    log
        The chain.
    """
    found, _ = run_steps(read_metrics(log.run.id, FleetKeyring(trusted_keys=log.trusted_keys)), log.store)
    return () if found is None else found.metrics
