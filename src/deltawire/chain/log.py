"""The chain as it lies in the store: which commits there are, and whether they fit together (docs/protocol.md §5).

Commits are immutable and never deleted, so what was read once is kept. That a slot is empty is never kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

from ..errors import (
    ChainBroken,
    CorruptRecord,
    DataMissing,
    LimitExceeded,
    NoChain,
    ObjectMissing,
    RollbackDetected,
    RunMismatch,
    UnsupportedVersion,
    VersionUnknown,
    WrongRun,
)
from ..format.records.canonical import MAX_INTEGER
from ..format.records.chain_records import (
    MAX_RECORD_BYTES,
    Commit,
    CommitRef,
    Epoch,
    Head,
    Limits,
    Mark,
    Run,
    Shortcut,
    check_same_run,
    record_hash,
)
from ..format.records.signing import check_signature
from ..store import keys
from ..store.base import Store
from ..store.urls import default_run_name
from .uptime import uptime
from .version import Version

_KEPT_BYTES = 32 << 20
_NEAR = 8
"""So many commits are read one by one before other ways are looked for."""

_LOOK_AGAIN = 30.0
"""Seconds after which the newest commit known is read from the store again, to see whether the store was set back."""

_SURE_AFTER = 60.0
"""Seconds for which the newest commit known may be missing before `RollbackDetected` says that waiting does not help."""


class ChainLog:
    """The reading side of a chain, for publishers and subscribers alike. May be used from several threads.

    `known` is the newest commit that was ever accepted, perhaps by an earlier process: a chain that does not lead to it is refused
    (`RollbackDetected`, `ChainBroken`). It moves up as newer ones are accepted. With `trusted_keys`, what none of them signed is refused.

    `run` is the name that the run must have (`RunMismatch`). One key may sign several runs, so with `trusted_keys` and without `run` the
    name must be the one that the URL suggests (`WrongRun`). That is not asked of the run whose id is `followed_run`: the reader's own
    records say that it follows this run already.
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
        self.store = store
        self.known = known
        self._clock = clock
        self._look_again = 0.0
        """When the slot of `known` is to be read anew, whatever is kept."""
        self._missed_since: float | None = None
        """When `known` was first not found, if it was not found by the last look."""
        self.followed_run = followed_run
        self._run_name = run
        self._suggested_name = default_run_name(store.url) if trusted_keys and run is None else None
        self.trusted_keys = frozenset(trusted_keys)
        self._own_limits = limits or Limits()
        self._run: Run | None = None
        self._kept: OrderedDict[int, tuple[bytes, str, Commit]] = OrderedDict()
        self._kept_bytes = 0
        self._sound: set[int] = set()
        """Slots whose commits are known not to be void: no commit before them has a higher epoch."""
        self._lock = threading.RLock()

    @property
    def run(self) -> Run:
        """Identity and limits of the chain. `NoChain` where there is none yet, `RunMismatch` for another than was asked for."""
        if self._run is None:
            data = self._get(keys.RUN)
            if data is None:
                raise NoChain(f"nothing is published at {self.store.url}.")
            run = Run.parse(data)
            if self._run_name is not None and run.run != self._run_name:
                raise RunMismatch(f"{self.store.url} holds the run {run.run!r}, not {self._run_name!r}.")
            self._run = run
        return self._run

    def trust_first_key(self) -> None:
        """Trust the key that signed the first commit, if it is signed and no keys were given. A chain is signed throughout or not at all.

        This is for whoever works on the chain without knowing its keys: what somebody else added without the key is refused. It does not
        prove whose chain it is, so readers that must know are given keys.
        """
        first = None if self.trusted_keys else self.read(0)
        if first is not None and first.signature is not None:
            self.forget()
            self.trusted_keys = frozenset({first.signature.key})

    @property
    def limits(self) -> Limits:
        """What records may claim: the run's limits, and the reader's own."""
        return self.run.limits.within(self._own_limits)

    def read(self, seq: int) -> Commit | None:
        """The commit in a slot, None if the slot is empty. Its form, run, limits and signature are checked; not what it links to."""
        found = self._slot(seq)
        return None if found is None else found[2]

    def raw(self, seq: int) -> bytes | None:
        """The bytes of the commit in a slot."""
        found = self._slot(seq)
        return None if found is None else found[0]

    def hash(self, seq: int) -> str:
        """The hash that links to this slot must carry. `VersionUnknown` if it is empty."""
        found = self._slot(seq)
        if found is None:
            raise VersionUnknown(f"the chain at {self.store.url} has no commit {seq}.")
        return found[1]

    def ref(self, commit: Commit) -> CommitRef:
        """A reference to a commit that was read from here."""
        return commit.ref(self.hash(commit.seq))

    def head(self) -> Commit | None:
        """What the newest slot holds, None while all are empty. It may be a fence, or void: see `in_force`.

        Accepted only if it leads down to `known`, which then moves up to it.
        """
        known = self.known
        self.check_known()
        if known is not None and self.read(known.seq + 1) is None:
            return self.read(known.seq)
        start = self._starting_point(known)
        if start is None:
            return None
        head = self._gallop(start)
        self.accept(head)
        return head

    def accept(self, commit: Commit) -> None:
        """Move `known` up to a newer commit of this chain, after checking that it leads down to what was known."""
        known = self.known
        if known is not None and commit.seq > known.seq:
            try:
                found = self.ancestor(commit, known.seq)
            except ChainBroken:
                self.check_known(now=True)  # what is kept may be of another history than what was read just now
                raise
            if self.hash(found.seq) != known.commit:
                raise self._rollback(f"commit {known.seq} in {self.store.url} is not the one that was seen before.")
        if known is None or commit.seq > known.seq:
            self.known = self.ref(commit)
            self._look_again = self._clock() + _LOOK_AGAIN

    def check_known(self, *, now: bool = False) -> None:
        """Raise `RollbackDetected` if the store does not hold the commit `known` any more, or holds another in its slot.

        What was read before is trusted for half a minute, unless `now` is given. The error is `retryable` for a minute: a replica of the
        store may be behind, and catch up.
        """
        known = self.known
        if known is None:
            return
        time = self._clock()
        if known.seq in self._kept and (now or time >= self._look_again):
            found = self._hash_in_store(known.seq)
            if found != known.commit:
                found = self._hash_in_store(known.seq)  # a bit may have flipped on the way
        else:
            found = self.hash(known.seq) if self.read(known.seq) is not None else None
        if found is None:
            raise self._rollback(f"commit {known.seq} was seen before, but is not in {self.store.url}.")
        if found != known.commit:
            raise self._rollback(f"commit {known.seq} in {self.store.url} is not the one that was seen before.")
        self._missed_since = None
        if now or time >= self._look_again:
            self._look_again = time + _LOOK_AGAIN

    def forget(self) -> None:
        """Read everything anew from here on: something was wrong, and it may have been what was read. `known` stays."""
        with self._lock:
            self._kept.clear()
            self._kept_bytes = 0
            self._sound.clear()

    def in_force(self, head: Commit) -> Commit:
        """The newest commit at or before `head` that is not void."""
        while self.is_void(head):
            head = self.ancestor(head, head.seq - 1)
        return head

    def is_void(self, commit: Commit) -> bool:
        """Whether a commit before this one has a higher epoch, so that this one is ignored.

        Reads back to the fence that began its epoch at most: a writer looks at the slot before its fence, so the fence itself is not void.
        """
        if commit.seq in self._sound:
            return False
        # Epochs are claimed before they are used, one after the other: if the next was not claimed, no commit can have a higher one.
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
        """The newest commit before this one that is not void, given one that is not void itself; None before the first."""
        if commit.kind == "fence":
            found = None if commit.base is None else self.ancestor(commit, commit.base.seq)
        else:
            # Its writer's fence lies before it, so whatever is of a lower epoch came after that fence, and is void.
            found = self.ancestor(commit, commit.seq - 1)
            while found.epoch < commit.epoch:
                found = self.ancestor(found, found.seq - 1)
        if found is not None and found.epoch > commit.epoch:
            raise ChainBroken(f"commit {commit.seq} in {self.store.url} is of epoch {commit.epoch}, but {found.epoch} comes before it.")
        if found is not None:
            self._sound.add(found.seq)
        return found

    def tail(self, after: int) -> Iterator[Commit]:
        """The commits after a slot, in order, each checked against its parent; void ones are left out. −1 starts at the beginning."""
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
        """The commit in an earlier slot, reached by the hashes in `parent` and `links` alone.

        `ChainBroken` where they lead astray, `DataMissing` where they lead to an empty slot.
        """
        if not 0 <= seq <= of.seq:
            raise VersionUnknown(f"commit {seq} is not one of those up to {of.seq}.")
        current = of
        while current.seq > seq:
            target, expected = min(link for link in _ways_down(current) if link[0] >= seq)
            found = self.read(target)
            if found is None:  # a cache or a replica may be behind, and show it later
                raise DataMissing(f"commit {target}, which commit {current.seq} links to, is not in {self.store.url}.")
            if self.hash(target) != expected:
                raise ChainBroken(f"commit {target} in {self.store.url} is another than the one that commit {current.seq} links to.")
            if current.seq in self._sound and found.epoch > current.epoch:
                raise ChainBroken(f"commit {target} in {self.store.url} is of epoch {found.epoch}, but {current.epoch} comes after it.")
            current = found
        return current

    def version(self, seq: int) -> Version:
        """The version in force at a slot. `VersionUnknown` where the chain has none."""
        commit = self.read(seq)
        if commit is None or commit.state_seq is None or self.is_void(commit):
            raise VersionUnknown(f"the chain at {self.store.url} has no version in commit {seq}.")
        return Version.of(self.state_commit(commit))

    def state_commit(self, commit: Commit) -> Commit:
        """The commit that made the state which this one leaves in force: itself, or for a fence the version before it."""
        if commit.state_seq is None:
            raise VersionUnknown(f"nothing is published yet in {self.store.url}.")
        made = self.ancestor(commit, commit.state_seq)
        if made.kind == "fence" or made.digest != commit.digest:
            raise ChainBroken(f"commit {commit.seq} in {self.store.url} says that commit {made.seq} is in force, which does not fit it.")
        return made

    def shortcuts(self, after: int | None, upto: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Shortcuts to versions above `after`, up to `upto`, by their names alone: versions with an anchor, and (seq, base) of skips."""
        return self.anchors(after, upto), self.skips(after, upto)

    def anchors(self, after: int | None, upto: int) -> list[int]:
        """The versions of which anchors are listed."""
        found = []
        for info in self.store.list(keys.ANCHORS, after=None if after is None else keys.anchor_key(after)):
            seq = keys.parse_anchor_key(info.key)
            if seq is not None and seq > upto:
                break
            if seq is not None:
                found.append(seq)
        return found

    def skips(self, after: int | None, upto: int) -> list[tuple[int, int]]:
        """(seq, base) of the skips that are listed."""
        found = []
        for info in self.store.list(keys.SKIPS, after=None if after is None else keys.skip_key(after, 10**20 - 1)):
            pair = keys.parse_skip_key(info.key)
            if pair is not None and pair[0] > upto:
                break
            if pair is not None:
                found.append(pair)
        return found

    def shortcut(self, seq: int, base: int | None = None) -> Shortcut | None:
        """The record of an anchor, or of a skip from `base`; None if there is none. Not yet compared with the chain's commits."""
        key = keys.anchor_key(seq) if base is None else keys.skip_key(seq, base)
        data = self._get(key)
        if data is None:
            return None
        shortcut = Shortcut.parse(data)
        check_same_run(shortcut.id, self.run, key)
        if (shortcut.target.seq, shortcut.base and shortcut.base.seq) != (seq, base):
            raise CorruptRecord(f"{key} holds {shortcut.describe()}.")
        self.limits.check(shortcut)
        check_signature(shortcut, self.trusted_keys)
        return shortcut

    def highest_epoch(self) -> int:
        """The highest epoch that is listed as claimed; 0 if none is. A listing may be old."""
        numbers = [number for info in self.store.list(keys.EPOCHS) if (number := keys.parse_epoch_key(info.key)) is not None]
        return max(numbers, default=0)

    def resumed_from(self, commit: Commit) -> int | None:
        """Return the version that the writer of a commit went back to when it began, or None if it went on from the newest.

        The answer lies below the writer's fence, or `ChainBroken` is raised. With trusted keys, the epoch of a commit of version 2 must be
        signed: `SignatureInvalid`.
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
                f"{epoch.describe()} in {self.store.url} says that it goes on from version {epoch.resumed_from}, its own or later."
            )
        return epoch.resumed_from

    def mark(self) -> Mark | None:
        """The newest announcement of what will be deleted; None before the first."""
        found = [info.key for info in self.store.list(keys.MARKS) if keys.parse_mark_key(info.key) is not None]
        return self._mark(found[-1]) if found else None

    def floor(self) -> int:
        """Data that only versions up to this one need may be gone; −1 while nothing was ever collected.

        A mark that cannot be read is passed over: it says what not to wait for, and nobody should be kept out by a broken one.
        """
        found = [info.key for info in self.store.list(keys.MARKS) if keys.parse_mark_key(info.key) is not None]
        for key in reversed(found):
            try:
                return self._mark(key).floor
            except (ObjectMissing, CorruptRecord, UnsupportedVersion, LimitExceeded):
                continue
        return -1

    def _mark(self, key: str) -> Mark:
        mark = Mark.parse(self.store.get(key, limit=MAX_RECORD_BYTES))
        check_same_run(mark.id, self.run, key)
        return mark

    def _hash_in_store(self, seq: int) -> str | None:
        """The hash of what a slot holds now, None if it is empty."""
        data = self._get(keys.commit_key(seq))
        return None if data is None else record_hash(data)

    def _rollback(self, message: str) -> RollbackDetected:
        """The error to raise. What was read before is dropped, for it may be of another history than what is there now."""
        self.forget()
        time = self._clock()
        self._missed_since = time if self._missed_since is None else self._missed_since
        error = RollbackDetected(message)
        error.retryable = time - self._missed_since < _SURE_AFTER
        return error

    def _starting_point(self, known: CommitRef | None) -> int | None:
        """A slot that is filled, the highest that is at hand; None if there is none."""
        hint = self._hint()
        start = -1 if known is None else known.seq
        if hint is not None and hint > start and self.read(hint) is not None:
            return hint
        return known.seq if known is not None else 0 if self.read(0) is not None else None

    def _hint(self) -> int | None:
        try:
            data = self._get(keys.HEAD)
            return None if data is None else Head.parse(data).seq
        except (CorruptRecord, UnsupportedVersion):  # anybody may have overwritten it; it is only a hint
            return None

    def _gallop(self, start: int) -> Commit:
        """The highest filled slot, given one: slots are filled without gaps."""
        filled, stride = start, 1
        while filled + stride <= MAX_INTEGER and self.read(filled + stride) is not None:
            filled, stride = filled + stride, 2 * stride
        empty = filled + stride
        while empty - filled > 1:
            middle = (filled + empty) // 2
            filled, empty = (middle, empty) if self.read(middle) is not None else (filled, middle)
        head = self.read(filled)
        assert head is not None
        return head

    def _slot(self, seq: int) -> tuple[bytes, str, Commit] | None:
        with self._lock:
            if seq in self._kept:
                self._kept.move_to_end(seq)
                return self._kept[seq]
        data = self._get(keys.commit_key(seq))
        if data is None:
            return None
        try:
            commit = Commit.parse(data)
        except CorruptRecord as error:
            raise CorruptRecord(f"slot {seq} in {self.store.url}: {error.message}") from None
        if commit.seq != seq:
            raise CorruptRecord(f"slot {seq} in {self.store.url} holds commit {commit.seq}.")
        check_same_run(commit.id, self.run, f"commit {seq} in {self.store.url}")
        self.limits.check(commit)
        check_signature(commit, self.trusted_keys)
        self._check_name(commit)
        found = data, record_hash(data), commit
        with self._lock:
            if seq not in self._kept:
                self._kept[seq] = found
                self._kept_bytes += len(data)
            while self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1][0])
        return found

    def _check_name(self, commit: Commit) -> None:
        """Check the run's name in a commit, which its signature covers. Commits of version 1 do not have it."""
        if commit.run is None:
            return
        if commit.run != self.run.run:
            raise RunMismatch(f"{commit.describe()} in {self.store.url} is of the run {commit.run!r}, but run.json says {self.run.run!r}.")
        if self._suggested_name is not None and commit.run != self._suggested_name and self.run.id != self.followed_run:
            raise WrongRun(f"{self.store.url} holds the run {commit.run!r}, but the URL suggests {self._suggested_name!r}.")

    def _get(self, key: str) -> bytes | None:
        try:
            return self.store.get(key, limit=MAX_RECORD_BYTES)
        except ObjectMissing:
            return None
        except LimitExceeded:
            raise CorruptRecord(f"{key} in {self.store.url} is larger than a record may be.") from None


def _ways_down(commit: Commit) -> list[tuple[int, str]]:
    assert commit.parent is not None  # only slot 0 has none, and nothing lies below it
    return [(commit.seq - 1, commit.parent), *commit.links]
