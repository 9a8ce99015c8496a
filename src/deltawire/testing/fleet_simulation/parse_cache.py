"""Caches parsed records while a simulation runs: parsing is pure, and takes most of the time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from ...format.records.fleet_files import Tasks
from ...format.records.member_records import Heartbeat, Lease
from ...format.records.trainer_records import BatchRecord, Board, Round
from ...format.rollouts import RolloutLimits, Rollouts

_MOST_CACHED = 4096


@contextlib.contextmanager
def cached_parsing(*more: Any) -> Iterator[None]:
    """Within this context, the real code parses the same bytes only once. Errors are not cached. `more` are further kinds of records."""
    kinds: tuple[Any, ...] = (Board, Heartbeat, Lease, Round, BatchRecord, Tasks, *more)
    originals = {kind: kind.__dict__["parse"] for kind in (*kinds, Rollouts)}
    parse_rollouts = lru_cache(_MOST_CACHED)(Rollouts.parse)
    for kind in kinds:
        kind.parse = staticmethod(lru_cache(_MOST_CACHED)(kind.parse))
    setattr(Rollouts, "parse", staticmethod(lambda data, limits=None: parse_rollouts(data, limits or RolloutLimits())))  # noqa: B010
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.parse = original
