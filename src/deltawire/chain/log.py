"""Read a chain: which commits exist, and whether they fit together (docs/protocol.md §5)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from ..errors import (
    ChainBroken,
    CorruptRecord,
    DataMissing,
    RollbackDetected,
    VersionUnknown,
)
from ..format.records.record_parts import CommitRef, Limits
from ..format.records.run_records import Epoch, check_same_run
from ..format.records.signing import check_signature
from ..format.records.version_records import Commit
from ..store import keys
from ..store.base import Store
from .newest_number import newest_number
from .records.record_reader import RecordReader
from .uptime import uptime
from .version import Version

_NEAR = 8
"""This many commits are read one by one before the search looks for faster routes."""

_RECHECK_SECONDS = 30.0
"""Seconds after which the newest known commit is read from the store again, to notice a store that was set back to an earlier state."""

_SURE_AFTER = 60.0
"""Seconds for which the newest known commit may be missing before `RollbackDetected` is no longer retryable."""


class ChainLog(RecordReader):
    """Reads the commits of a chain, for publishers and subscribers. May be used from several threads.

    `known` is the newest commit that was ever accepted, perhaps by an earlier process. It moves up as newer commits are accepted. A chain
    that does not lead to it is refused (`RollbackDetected`, `ChainBroken`).

    Parameters
    ----------
    store, run, trusted_keys, limits, followed_run
        As for `RecordReader`.
    known
        The newest commit that an earlier process accepted.
    clock
        Returns seconds on a clock that never goes back.
    """

    def __init__(
        self,
        store: Store,
        *,
        run: str | None = None,
        trusted_keys: Collection[str] = (),
        known: CommitRef | None = None,
        limits: Limits | None = None,
        followed_run: str | None = None,
        clock: Callable[[], float] = uptime,
    ) -> None:
        super().__init__(store, run=run, trusted_keys=trusted_keys, limits=limits, followed_run=followed_run)
        self.known = known
        self._clock = clock
        self._recheck_at = 0.0
        """When `known` is read from the store again."""
        self._missing_since: float | None = None
        """When `known` was first not found. None if the last read found it."""
        self._sound: set[int] = set()
        """The seqs of commits that are known not to be void: no commit before them has a higher epoch."""

    def forget(self) -> None:
        super().forget()
        self._sound.clear()

    def head(self) -> Commit | None:
        """Return the commit with the highest seq, or None if the chain has none. It may be a fence, or void: see `in_force`.

        The commit is accepted only if it leads down to `known`, which then moves up to it.
        """
        known = self.known
        self.check_known()
        head = None if known is None else self.read(known.seq + 1)
        if known is not None and head is None:
            return self.read(known.seq)
        if head is None or self.read(head.seq + 1) is not None:  # otherwise this reader keeps up, and need not ask for the hint
            start = self._starting_point(known)
            if start is None:
                return None
            head = self._gallop(start)
        self.accept(head)
        return head

    def accept(self, commit: Commit) -> None:
        """Move `known` up to a newer commit of this chain, after checking that this commit leads down to `known`."""
        known = self.known
        if known is not None and commit.seq > known.seq:
            try:
                found = self.ancestor(commit, known.seq)
            except ChainBroken:
                self.check_known(now=True)  # the commits in memory may belong to another history
                raise
            if self.hash(found.seq) != known.commit:
                raise self._rollback(f"commit {known.seq} in {self.store.url} is not the one that was seen before.")
        if known is None or commit.seq > known.seq:
            self.known = self.ref(commit)
            self._recheck_at = self._clock() + _RECHECK_SECONDS

    def check_known(self, *, now: bool = False) -> None:
        """Raise `RollbackDetected` if the store no longer holds the commit `known`, or holds another commit at its seq.

        Commits that were read are trusted for half a minute, unless `now` is set. The error is `retryable` for a minute, because a replica
        of the store may lag behind.
        """
        known = self.known
        if known is None:
            return
        time = self._clock()
        if known.seq in self._kept and (now or time >= self._recheck_at):
            found = self._hash_in_store(known.seq)
            if found != known.commit:
                found = self._hash_in_store(known.seq)  # a bit may have flipped in transit
        else:
            found = self.hash(known.seq) if self.read(known.seq) is not None else None
        if found is None:
            raise self._rollback(f"commit {known.seq} was seen before, but is not in {self.store.url}.")
        if found != known.commit:
            raise self._rollback(f"commit {known.seq} in {self.store.url} is not the one that was seen before.")
        self._missing_since = None
        if now or time >= self._recheck_at:
            self._recheck_at = time + _RECHECK_SECONDS

    def in_force(self, head: Commit) -> Commit:
        """Return the newest commit at or before `head` that is not void."""
        while self.is_void(head):
            head = self.ancestor(head, head.seq - 1)
        return head

    def is_void(self, commit: Commit) -> bool:
        """Return whether a commit before this one has a higher epoch, so that this one is ignored.

        Reads back at most to the fence that began its epoch. That fence is not void, because a writer reads the commit before its fence.
        """
        if commit.seq in self._sound:
            return False
        # Epochs are claimed one after the other, before they are used. If the next is not claimed, no commit has a higher one.
        near = any(seq in self._sound for seq in range(commit.seq - _NEAR, commit.seq))
        if near or self._get(keys.epoch_key(commit.epoch + 1)) is not None:
            earlier, at_fence = commit, False
            while earlier.seq > 0 and earlier.seq not in self._sound and not at_fence:
                at_fence = earlier.kind == "fence" and earlier.epoch == commit.epoch
                earlier = self.ancestor(earlier, earlier.seq - 1)
                if earlier.epoch > commit.epoch:
                    return True
        self._sound.add(commit.seq)
        return False

    def previous(self, commit: Commit) -> Commit | None:
        """Return the newest commit before this one that is not void, or None for the first. `commit` itself must not be void."""
        if commit.kind == "fence":
            found = None if commit.base is None else self.ancestor(commit, commit.base.seq)
        else:
            # The writer's fence lies before this commit, so commits of a lower epoch after that fence are void.
            found = self.ancestor(commit, commit.seq - 1)
            while found.epoch < commit.epoch:
                found = self.ancestor(found, found.seq - 1)
        if found is not None and found.epoch > commit.epoch:
            raise ChainBroken(f"commit {commit.seq} in {self.store.url} is of epoch {commit.epoch}, but {found.epoch} comes before it.")
        if found is not None:
            self._sound.add(found.seq)
        return found

    def tail(self, after: int) -> Iterator[Commit]:
        """Yield the commits after a seq in order, without void ones, each checked against its parent. −1 starts at the beginning."""
        previous = self.read(after) if after >= 0 else None
        if previous is None and after >= 0:
            raise VersionUnknown(f"the chain at {self.store.url} has no commit {after}.")
        epoch = self.in_force(previous).epoch if previous is not None else 0
        seq = after + 1
        while (commit := self.read(seq)) is not None:
            if previous is not None and commit.parent != self.hash(previous.seq):
                raise ChainBroken(f"commit {seq} in {self.store.url} does not follow commit {seq - 1}: its parent is another.")
            if self.known is not None and previous is not None and self.known == self.ref(previous):
                self.known = self.ref(commit)
            if commit.epoch >= epoch:
                epoch = commit.epoch
                self._sound.add(seq)
                yield commit
            previous, seq = commit, seq + 1

    def ancestor(self, of: Commit, seq: int) -> Commit:
        """Return the commit at an earlier seq. Only hashes in `parent` and `links` are followed.

        Raises `ChainBroken` if a hash does not match, and `DataMissing` if a link leads to a commit that is missing.
        """
        if not 0 <= seq <= of.seq:
            raise VersionUnknown(f"the chain has no commit {seq}; the newest is {of.seq}.")
        current = of
        while current.seq > seq:
            target, expected = min(link for link in _links_down(current) if link[0] >= seq)
            found = self.read(target)
            if found is None:  # a cache or a replica may lag behind
                raise DataMissing(f"commit {target}, which commit {current.seq} links to, is not in {self.store.url}.")
            if self.hash(target) != expected:
                raise ChainBroken(f"commit {target} in {self.store.url} is another than the one that commit {current.seq} links to.")
            if current.seq in self._sound and found.epoch > current.epoch:
                raise ChainBroken(f"commit {target} in {self.store.url} is of epoch {found.epoch}, but {current.epoch} comes after it.")
            current = found
        return current

    def version(self, seq: int) -> Version:
        """Return the version in force at a seq. Raises `VersionUnknown` if the chain has none there."""
        commit = self.read(seq)
        if commit is None or commit.state_seq is None or self.is_void(commit):
            raise VersionUnknown(f"the chain at {self.store.url} has no version in commit {seq}.")
        return Version.of(self.state_commit(commit))

    def state_commit(self, commit: Commit) -> Commit:
        """Return the commit that made the state in force after this commit: the commit itself, or for a fence the version before it."""
        if commit.state_seq is None:
            raise VersionUnknown(f"nothing is published yet in {self.store.url}.", hint="Publish a version first.")
        made = self.ancestor(commit, commit.state_seq)
        if made.kind == "fence" or made.digest != commit.digest:
            raise ChainBroken(f"commit {commit.seq} in {self.store.url} says that commit {made.seq} is in force, which does not fit it.")
        return made

    def shortcuts(self, after: int | None, upto: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the shortcuts to versions above `after`, up to `upto`, from their keys alone: versions with an anchor, and (seq, base) of
        skips.
        """
        return self.anchors(after, upto), self.skips(after, upto)

    def resumed_from(self, commit: Commit) -> int | None:
        """Return the version that the writer of a commit went back to when it began, or None if it continued from the newest.

        Raises `ChainBroken` unless that version is below the writer's fence. With trusted keys, the epoch of a commit of version 2 must be
        signed (`SignatureInvalid`).
        """
        key = keys.epoch_key(commit.epoch)
        data = self._get(key)
        if data is None:
            raise DataMissing(f"{key}, which commit {commit.seq} is written under, is not in {self.store.url}.")
        epoch = Epoch.parse(data)
        check_same_run(epoch.id, self.run, key)
        if epoch.epoch != commit.epoch:
            raise CorruptRecord(f"{key} in {self.store.url} holds {epoch.describe()}.")
        if commit.version > 1 or epoch.signature is not None:
            check_signature(epoch, self.trusted_keys)
        if epoch.resumed_from is not None and epoch.resumed_from >= commit.seq - 1:
            raise ChainBroken(
                f"{epoch.describe()} in {self.store.url} says that it continues from version {epoch.resumed_from}, its own or later."
            )
        return epoch.resumed_from

    def _rollback(self, message: str) -> RollbackDetected:
        """Return the error to raise. Forgets the commits that were read, because they may belong to another history than the store's
        present
        one.
        """
        self.forget()
        time = self._clock()
        self._missing_since = time if self._missing_since is None else self._missing_since
        error = RollbackDetected(message)
        error.retryable = time - self._missing_since < _SURE_AFTER
        return error

    def _starting_point(self, known: CommitRef | None) -> int | None:
        """Return the highest seq that is known to have a commit, or None if there is none."""
        hint = self.hint()
        start = -1 if known is None else known.seq
        if hint is not None and hint > start and self.read(hint) is not None:
            return hint
        return known.seq if known is not None else 0 if self.read(0) is not None else None

    def _gallop(self, start: int) -> Commit:
        """Return the commit with the highest seq. `start` is the seq of a commit, and seqs have no gaps."""
        newest = newest_number(start, lambda seq: self.read(seq) is not None)
        head = self.read(newest)
        assert head is not None
        return head


def _links_down(commit: Commit) -> list[tuple[int, str]]:
    assert commit.parent is not None  # only commit 0 has none, and nothing lies below it
    return [(commit.seq - 1, commit.parent), *commit.links]
