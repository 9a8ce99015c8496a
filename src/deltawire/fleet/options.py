"""How a trainer runs a fleet."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..format.rollouts import RolloutLimits


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How a trainer runs its fleet.

    Parameters
    ----------
    lease_seconds
        How long a member may be silent before its tasks go to other members.
    quorum
        The part of a round's tasks that must have a result before the step is trained, above 0 and at most 1.
    poll_seconds
        How often the trainer looks at the fleet.
    keep_steps
        For how many training steps acknowledged results stay in the store. A trainer that is resumed from a step this far back still
        finds them. So save checkpoints at least this often.
    environment_tokens
        How many tokens an environment may add to a completion (tool output, further turns of a conversation). They do not count as tokens
        of the policy.
    patience_seconds
        How long the trainer waits for other members after all members have left because of errors. Then collecting raises
        `FleetDeserted`. With `math.inf` it waits for ever: choose that if you do not trust all processes that may write heartbeats.
    limits
        The largest sizes of a file of rollouts.
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
            raise ValueError("lease_seconds and keep_steps must be at least 1, poll_seconds positive, and quorum in (0, 1]")
        if self.environment_tokens < 0 or not self.patience_seconds >= 0:
            raise ValueError("environment_tokens and patience_seconds must be at least 0")
