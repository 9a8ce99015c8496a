"""Parsing is pure, and takes most of a simulation's time: what was parsed once is remembered while one runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from ...format.records.fleet_files import Tasks
from ...format.records.member_records import Heartbeat, Lease
from ...format.records.trainer_records import BatchRecord, Board, Round
from ...format.rollouts import RolloutLimits, Rollouts

_KEPT = 4096


@contextlib.contextmanager
def remembered_parsing() -> Iterator[None]:
    """Within, the same bytes are parsed by the real code once. What it refuses is refused anew each time."""
    kinds: tuple[Any, ...] = (Board, Heartbeat, Lease, Round, BatchRecord, Tasks)
    originals = {kind: kind.__dict__["parse"] for kind in (*kinds, Rollouts)}
    parse_rollouts = lru_cache(_KEPT)(Rollouts.parse)
    for kind in kinds:
        kind.parse = staticmethod(lru_cache(_KEPT)(kind.parse))
    setattr(Rollouts, "parse", staticmethod(lambda data, limits=None: parse_rollouts(data, limits or RolloutLimits())))  # noqa: B010
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.parse = original
