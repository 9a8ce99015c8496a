"""Rollout work on the store: tasks, leases, results, and who gets how much. Imports no torch."""

from __future__ import annotations

from ..format.records.trainer_records import Round, Sampling
from ..format.rollouts import ClaimedVersion, Completion, Rollouts, TokenSpan
from .batch import Batch
from .coordinator import Coordinator
from .options import FleetOptions
from .rules.roster import MemberStatus
from .rules.scheduler import Scheduler
from .rules.staleness import StalenessBudget
from .rules.training_limits import TrainingLimits

__all__ = [
    "Batch",
    "ClaimedVersion",
    "Completion",
    "Coordinator",
    "FleetOptions",
    "MemberStatus",
    "Rollouts",
    "Round",
    "Sampling",
    "Scheduler",
    "StalenessBudget",
    "TokenSpan",
    "TrainingLimits",
]
