"""The chain as a fleet sees it: numbered versions, writers that fence each other, and rewinds."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from ...errors import Fenced
from ...fleet.rules.staleness import KnownVersion
from ...format.digest import Digest


class ChainModel:
    """A chain without data. It has one writer at a time, and a trainer that resumes from an older version abandons the later ones.

    Digests identify weights: resuming from the version of a step makes a new version with the same digest.

    Parameters
    ----------
    random
        Draws the digests.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self.appended: Callable[[KnownVersion], None] = lambda version: None
        """Called with every new version."""
        self.claimed = 0
        self.epoch = 0
        self.highest_step = 0
        self._commits: list[KnownVersion | None] = []
        self._live: list[int] = []
        """Commits of the versions in the history that leads to the head, including rewinds."""

    def head(self) -> KnownVersion | None:
        """Return the version in force."""
        return self._commits[self._live[-1]] if self._live else None

    def find(self, seq: int) -> KnownVersion | None:
        """Return a version as it is now; None for a commit that does not exist or is a fence."""
        return self._commits[seq] if 0 <= seq < len(self._commits) else None

    def at(self, seq: int) -> KnownVersion | None:
        """Return the version that was in force when commit `seq` was the newest."""
        return next((version for version in reversed(self._commits[: max(0, seq + 1)]) if version is not None), None)

    def live(self) -> list[KnownVersion]:
        """Return the versions of the history that leads to the head, oldest first."""
        return [version for seq in self._live if (version := self._commits[seq]) is not None]

    def every(self) -> list[KnownVersion]:
        """Return all versions, including abandoned ones."""
        return [version for version in self._commits if version is not None]

    def claim(self) -> int:
        """Return the number of a new epoch. The earlier writer may publish until the fence of the new epoch."""
        self.claimed += 1
        return self.claimed

    def fence(self, epoch: int, resume_step: int) -> KnownVersion | None:
        """End the earlier epochs. If there are versions after `resume_step`, abandon them by a rewind to the version of that step.

        Return the version that is then in force. Raise `Fenced` if a later epoch has begun.
        """
        if epoch < self.epoch:
            raise Fenced(f"epoch {self.epoch} has begun.")
        self.epoch = epoch
        self._commits.append(None)
        head = self.head()
        if head is None or resume_step >= head.step:
            return head
        base = next(version for version in reversed(self.live()) if version.step == resume_step)
        kept = [seq for seq in self._live if seq <= base.seq]
        for seq in self._live[len(kept) :]:
            abandoned = self._commits[seq]
            assert abandoned is not None
            self._commits[seq] = KnownVersion(abandoned.seq, abandoned.step, abandoned.digest, live=False)
        self._live = kept
        return self._append(resume_step, base.digest)

    def publish(self, epoch: int, step: int) -> KnownVersion:
        """Publish a new version, and return it. Raise `Fenced` if a later epoch has begun."""
        if epoch != self.epoch:
            raise Fenced(f"epoch {self.epoch} has begun.")
        self.highest_step = max(self.highest_step, step)
        return self._append(step, Digest.from_hex(f"{self._random.getrandbits(128):032x}"))

    def _append(self, step: int, digest: Digest) -> KnownVersion:
        version = KnownVersion(len(self._commits), step, digest)
        self._live.append(version.seq)
        self._commits.append(version)
        self.appended(version)
        return version
