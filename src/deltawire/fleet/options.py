"""How a fleet is run."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..format.rollouts import RolloutLimits


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What the trainer decides.

    `lease_seconds`: how long a member may be silent before its tasks go to others. `quorum`: the part of a round's tasks that must have
    a result before the step is trained. `poll_seconds`: how often the trainer looks. `keep_steps`: for so many training steps what was
    acknowledged stays in the store, so that a trainer may be resumed from so far back and find it. `environment_tokens`: how many tokens,
    beside those that the policy draws, an environment may put into a completion (tool output, further turns of a conversation).
    `patience_seconds`: after members have left because of errors, how long the trainer waits for others while nobody is there; then
    collecting raises `FleetDeserted`. With `math.inf` it waits for ever: choose that if you do not trust all who may write heartbeats.
    """

    lease_seconds: int = 60
    quorum: float = 1.0
    poll_seconds: float = 0.5
    keep_steps: int = 8
    environment_tokens: int = 0
    patience_seconds: float = 120.0
    limits: RolloutLimits = field(default_factory=RolloutLimits)

    def __post_init__(self) -> None:
        if self.lease_seconds < 1 or not 0 < self.quorum <= 1 or self.poll_seconds <= 0 or self.keep_steps < 1:
            raise ValueError("lease_seconds and keep_steps are at least 1, poll_seconds is positive, and quorum in (0, 1]")
        if self.environment_tokens < 0 or not self.patience_seconds >= 0:
            raise ValueError("environment_tokens and patience_seconds are at least 0")
