"""Rollouts from a fleet, through the store: rounds, tasks, leases and results. Does not import torch.

coordinator     the trainer's side of a fleet
options         how a trainer runs a fleet
member          one member: an engine, rewards, a heartbeat and work
generation      what an engine must offer to a member
overview        a fleet as people see it: members, rounds and results
supervision     keeps members running, and starts dead ones again
local_members   members as processes of this machine
member_output   what members print, as lines and events
chain_versions  which versions a chain has, and which of them were abandoned
member_link     measures a member's link to the store
member_routing  the routed experts of a result
update_times    where the time of a member's last update went
store_events    events that are made from the store of a run alone
fleet_keyring   signatures of the trainer's records
rules/          the rules, without I/O
steps/          what trainer and members do, as generators of requests
"""

from __future__ import annotations

from ..format.records.trainer_records import Round, Sampling
from ..format.rollouts import ClaimedVersion, Completion, Rollouts, TokenSpan
from .coordinator import Coordinator
from .options import FleetOptions
from .rules.roster import MemberStatus
from .rules.scheduler import Scheduler
from .rules.staleness import StalenessBudget
from .rules.training_limits import TrainingLimits
from .steps.batch_steps import Batch

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
