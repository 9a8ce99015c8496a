"""The chain as far as a fleet sees it: versions in one line of slots, writers that fence each other, and rewinds."""

from __future__ import annotations

from random import Random

from ...errors import Fenced
from ...fleet.rules.staleness import KnownVersion
from ...format.digest import Digest


class ChainModel:
    """What docs/protocol.md promises of a chain, without bytes: one writer at a time; who resumes from an older version abandons the later.

    Digests say what a version is: resuming from the version of a step gives its digest back under a new number.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self.claimed = 0
        self.epoch = 0
        self.highest_step = 0
        self._slots: list[KnownVersion | None] = []
        self._live: list[int] = []
        """Slots of the versions in the history that leads to the head, the rewinds among them."""

    def head(self) -> KnownVersion | None:
        """The version in force."""
        return self._slots[self._live[-1]] if self._live else None

    def find(self, seq: int) -> KnownVersion | None:
        """A version as it stands now; None for a slot that is empty or holds a fence."""
        return self._slots[seq] if 0 <= seq < len(self._slots) else None

    def live(self) -> list[KnownVersion]:
        """The versions of the history that leads to the head, oldest first."""
        return [version for seq in self._live if (version := self._slots[seq]) is not None]

    def every(self) -> list[KnownVersion]:
        """All versions that ever were, abandoned ones too."""
        return [version for version in self._slots if version is not None]

    def claim(self) -> int:
        """The number of a new epoch. Until its fence, the writer before may still publish."""
        self.claimed += 1
        return self.claimed

    def fence(self, epoch: int, resume_step: int) -> KnownVersion | None:
        """End the epochs before, and go back to the version of a step if later ones must be abandoned: that is a rewind.

        Gives the version that is then in force: of that step, or of the one before it if that was never published. `Fenced`.
        """
        if epoch < self.epoch:
            raise Fenced(f"epoch {self.epoch} has begun.")
        self.epoch = epoch
        self._slots.append(None)
        head = self.head()
        if head is None or resume_step >= head.step:
            return head
        base = next(version for version in reversed(self.live()) if version.step == resume_step)
        kept = [seq for seq in self._live if seq <= base.seq]
        for seq in self._live[len(kept) :]:
            gone = self._slots[seq]
            assert gone is not None
            self._slots[seq] = KnownVersion(gone.seq, gone.step, gone.digest, live=False)
        self._live = kept
        return self._append(resume_step, base.digest)

    def publish(self, epoch: int, step: int) -> KnownVersion:
        """A new version. `Fenced` for who is not the writer any more."""
        if epoch != self.epoch:
            raise Fenced(f"epoch {self.epoch} has begun.")
        self.highest_step = max(self.highest_step, step)
        return self._append(step, Digest.from_hex(f"{self._random.getrandbits(128):032x}"))

    def _append(self, step: int, digest: Digest) -> KnownVersion:
        version = KnownVersion(len(self._slots), step, digest)
        self._live.append(version.seq)
        self._slots.append(version)
        return version
