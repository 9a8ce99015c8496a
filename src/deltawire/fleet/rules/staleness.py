"""One budget for how old a policy may be: what members may start, what the trainer accepts, and when the trainer must wait."""

from __future__ import annotations

from dataclasses import dataclass

from ...format.digest import Digest


@dataclass(frozen=True, slots=True)
class KnownVersion:
    """A version as the chain has it. `live`: it is in the history that leads to the head; else a rewind has abandoned it."""

    seq: int
    step: int
    digest: Digest
    live: bool = True


@dataclass(frozen=True, slots=True)
class StalenessBudget:
    """Training step N may use tokens of versions whose own step is N−1−`steps` or later.

    The version of step N−1 is the newest that can be there when step N is prepared, so `steps` counts how many updates behind it a policy
    may be. 0 is the synchronous mode: generate, train, publish, one after the other. 1 or more let the fleet generate for the next steps
    while the trainer trains: the same loop, pipelined. All questions are about one line of history: versions that a rewind abandoned are in
    none, however young.
    """

    steps: int = 1

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"a staleness budget counts training steps; {self.steps} is below 0")

    def oldest_step(self, for_step: int) -> int:
        """The oldest step whose version may make a token for training step `for_step`."""
        return max(0, for_step - 1 - self.steps)

    def admits(self, for_step: int, made_by: int) -> bool:
        """Whether tokens by the version of step `made_by` may be trained on in step `for_step`. Never ones by itself or a later one."""
        return self.oldest_step(for_step) <= made_by < for_step

    def newest_open(self, published: int) -> int:
        """The last training step that rounds may be open for while `published` is the newest step that is out.

        A round for a later step could not be met by anything that members can make now: the trainer must train and publish first.
        """
        return published + 1 + self.steps
