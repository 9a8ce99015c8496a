"""How old the policy may be that made a token, in training steps."""

from __future__ import annotations

from dataclasses import dataclass

from ...format.digest import Digest
from ...format.records.trainer_records import Round


@dataclass(frozen=True, slots=True)
class KnownVersion:
    """A version that the chain has.

    Parameters
    ----------
    seq
        The number of its commit.
    step
        The training step that made it.
    digest
        The digest of its weights.
    live
        True if it is in the history that leads to the head. False if a rewind has abandoned it.
    """

    seq: int
    step: int
    digest: Digest
    live: bool = True


def may_work(version: KnownVersion, record: Round) -> bool:
    """Return whether a version may make tokens for a round. A member asks before it leases a task, and again before it begins the task.

    Parameters
    ----------
    version
        The version that the member's engine has.
    record
        The round.
    """
    return record.oldest_step <= version.step < record.for_step


@dataclass(frozen=True, slots=True)
class StalenessBudget:
    """The one rule about old policies: it limits what members may start, what the trainer accepts, and when the trainer must wait.

    Training step N may use tokens of versions whose own step is N−1−`steps` or later. All methods are about one line of history:
    abandoned versions are never admitted, however new they are.

    Parameters
    ----------
    steps
        How many updates a policy may be behind the version of step N−1, which is the newest that can exist when step N is prepared. 0 is
        the synchronous mode: generate, train, publish, one after the other. With 1 or more, the fleet generates for the next steps while
        the trainer trains.
    """

    steps: int = 1

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"a staleness budget counts training steps; {self.steps} is below 0")

    def oldest_step(self, for_step: int) -> int:
        """Return the oldest step whose version may make a token for a training step.

        Parameters
        ----------
        for_step
            The training step.
        """
        return max(0, for_step - 1 - self.steps)

    def admits(self, for_step: int, made_by: int) -> bool:
        """Return whether a training step may use tokens of a version.

        Parameters
        ----------
        for_step
            The training step.
        made_by
            The step of the version. It must be an earlier step.
        """
        return self.oldest_step(for_step) <= made_by < for_step

    def newest_open(self, published: int) -> int:
        """Return the last training step that rounds may be open for.

        No member has a version that could work for a later step: the trainer must train and publish first.

        Parameters
        ----------
        published
            The newest published step.
        """
        return published + 1 + self.steps
