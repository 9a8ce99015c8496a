"""What a training step trains on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from ..format.records.fleet_files import AcceptedResult, Row
from ..format.records.trainer_records import Round
from ..format.rollouts import Rollouts
from .rules.admission import Reason


@dataclass(frozen=True, slots=True)
class Batch:
    """What training step `step` trains on: acknowledged, so no trainer that takes over will lose it.

    `rollouts[i]` was made from `rows[i]`, and `results[i]` says where it is in the store and who made it. `rejected` counts the results
    for this step that were refused.
    """

    step: int
    round: Round
    rows: tuple[tuple[Row, ...], ...]
    rollouts: tuple[Rollouts, ...]
    results: tuple[AcceptedResult, ...]
    rejected: Counter[Reason]

    def without(self, left_out: Collection[int]) -> Batch:
        """Return the batch without the results of these indices."""
        kept = [index for index in range(len(self.results)) if index not in left_out]
        return replace(
            self,
            rows=tuple(self.rows[index] for index in kept),
            rollouts=tuple(self.rollouts[index] for index in kept),
            results=tuple(self.results[index] for index in kept),
        )
