"""Read single records of a chain from the store, and check each by itself.

`deltawire.chain.log` checks whether commits fit together. Commits are immutable and never deleted, so those that were read are
kept in memory. A missing commit is never remembered, because it may be made at any time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection

from ...errors import CorruptRecord, LimitExceeded, NoChain, ObjectMissing, RunMismatch, UnsupportedVersion, VersionUnknown, WrongRun
from ...format.records.canonical import MAX_RECORD_BYTES
from ...format.records.collection_records import Mark
from ...format.records.record_parts import CommitRef, FileEntry, Limits, record_hash
from ...format.records.run_records import Head, Run, check_same_run
from ...format.records.signing import check_signature
from ...format.records.version_records import Commit, Shortcut
from ...store import keys
from ...store.base import Store
from ...store.urls import default_run_name
from ..fetch import Fetcher, WasCollected
from .file_lists import FileLists

_KEPT_BYTES = 32 << 20
"""Bytes of commits that are kept in memory."""


class RecordReader:
    """Reads the records of one chain. May be used from several threads.

    Parameters
    ----------
    store
        The store that holds the chain.
    run
        The name that the run must have (`RunMismatch`). One key may sign several runs, so with `trusted_keys` and without `run` the name
        must be the one that the URL suggests (`WrongRun`).
    trusted_keys
        Public keys. Records that none of them signed are refused (`SignatureInvalid`).
    limits
        The largest sizes that records may claim, in addition to the run's own limits.
    followed_run
        The id of a run that the reader already follows. This run may have another name than the URL suggests.
    """

    def __init__(
        self,
        store: Store,
        *,
        run: str | None = None,
        trusted_keys: Collection[str] = (),
        limits: Limits | None = None,
        followed_run: str | None = None,
    ) -> None:
        self.store = store
        self.followed_run = followed_run
        self.trusted_keys = frozenset(trusted_keys)
        self._run_name = run
        self._suggested_name = default_run_name(store.url) if trusted_keys and run is None else None
        self._own_limits = limits or Limits()
        self._run: Run | None = None
        self._kept: OrderedDict[int, tuple[bytes, str, Commit]] = OrderedDict()
        self._kept_bytes = 0
        self._lists = FileLists()
        self._lock = threading.RLock()

    @property
    def run(self) -> Run:
        """Identity and limits of the chain. Raises `NoChain` if nothing is published, and `RunMismatch` if the run has another name."""
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
        """Trust the key that signed the first commit, if it is signed and no keys were given.

        This is for code that works on a chain without knowing its keys. It refuses records that were added without the key. It does not
        prove who made the chain; readers that need proof are given keys.
        """
        first = None if self.trusted_keys else self.read(0)
        if first is not None and first.signature is not None:
            self.forget()
            self.trusted_keys = frozenset({first.signature.key})

    @property
    def limits(self) -> Limits:
        """The largest sizes that records may claim: the smaller of the run's limits and the reader's own."""
        return self.run.limits.within(self._own_limits)

    def read(self, seq: int) -> Commit | None:
        """Return the commit at a seq, or None if there is none. Its form, run, limits and signature are checked, but not its links."""
        found = self._record(seq)
        return None if found is None else found[2]

    def raw(self, seq: int) -> bytes | None:
        """Return the bytes of the commit at a seq, or None if there is none."""
        found = self._record(seq)
        return None if found is None else found[0]

    def hash(self, seq: int) -> str:
        """Return the hash of the commit at a seq, which links to it must have. Raises `VersionUnknown` if there is none."""
        found = self._record(seq)
        if found is None:
            raise VersionUnknown(f"the chain at {self.store.url} has no commit {seq}.")
        return found[1]

    def ref(self, commit: Commit) -> CommitRef:
        """Return a reference to a commit that was read from this chain."""
        return commit.ref(self.hash(commit.seq))

    def forget(self) -> None:
        """Forget all commits that were read, so that they are read again.

        Call it after an error, because one of them may have been wrong.
        """
        with self._lock:
            self._kept.clear()
            self._kept_bytes = 0
        self._lists.forget()

    def files_of(
        self, record: Commit | Shortcut, *, fetcher: Fetcher | None = None, collected: WasCollected | None = None
    ) -> tuple[FileEntry, ...]:
        """Return the files of a commit or shortcut. If it has a file list, the list is read from the store, once.

        Raises the errors of `FileLists.files_of`. Without a `fetcher`, a missing list is not waited for.
        """
        if record.file_list is None:
            return record.files
        fetcher = fetcher or Fetcher(self.store, limits=self.limits, patience=0)
        return self._lists.files_of(record, fetcher, self.limits, collected=collected)

    def anchors(self, after: int | None, upto: int) -> list[int]:
        """Return the versions above `after`, up to `upto`, that have an anchor in the listing."""
        found = []
        for info in self.store.list(keys.ANCHORS, after=None if after is None else keys.anchor_key(after)):
            seq = keys.parse_anchor_key(info.key)
            if seq is not None and seq > upto:
                break
            if seq is not None:
                found.append(seq)
        return found

    def skips(self, after: int | None, upto: int) -> list[tuple[int, int]]:
        """Return (seq, base) of the skips in the listing that lead to versions above `after`, up to `upto`."""
        found = []
        for info in self.store.list(keys.SKIPS, after=None if after is None else keys.skip_key(after, 10**20 - 1)):
            pair = keys.parse_skip_key(info.key)
            if pair is not None and pair[0] > upto:
                break
            if pair is not None:
                found.append(pair)
        return found

    def shortcut(self, seq: int, base: int | None = None) -> Shortcut | None:
        """Return the record of an anchor, or of a skip from `base`. Returns None if there is none.

        It is not yet compared with the commits.
        """
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
        """Return the highest claimed epoch in the listing, or 0. The listing may be old."""
        numbers = [number for info in self.store.list(keys.EPOCHS) if (number := keys.parse_epoch_key(info.key)) is not None]
        return max(numbers, default=0)

    def mark(self) -> Mark | None:
        """Return the newest mark, which announces what will be deleted, or None if there is none."""
        found = [info.key for info in self.store.list(keys.MARKS) if keys.parse_mark_key(info.key) is not None]
        return self._mark(found[-1]) if found else None

    def floor(self) -> int:
        """Return the version up to which data may have been deleted, or −1 if nothing was ever collected.

        A mark that cannot be read is ignored, so that a broken mark does not stop readers.
        """
        found = [info.key for info in self.store.list(keys.MARKS) if keys.parse_mark_key(info.key) is not None]
        for key in reversed(found):
            try:
                return self._mark(key).floor
            except (ObjectMissing, CorruptRecord, UnsupportedVersion, LimitExceeded):
                continue
        return -1

    def object(self, key: str) -> bytes | None:
        """Return the bytes of any record, or None if there is none. The caller checks them. Raises `CorruptRecord` if they are too many."""
        return self._get(key)

    def _mark(self, key: str) -> Mark:
        mark = Mark.parse(self.store.get(key, limit=MAX_RECORD_BYTES))
        check_same_run(mark.id, self.run, key)
        return mark

    def _hash_in_store(self, seq: int) -> str | None:
        """Return the hash of the commit that the store now has at a seq, or None if it has none."""
        data = self._get(keys.commit_key(seq))
        return None if data is None else record_hash(data)

    def hint(self) -> int | None:
        """Return the number of the newest commit that the writer's hint names. None if there is none. Nobody should trust it."""
        try:
            data = self._get(keys.HEAD)
            return None if data is None else Head.parse(data).seq
        except (CorruptRecord, UnsupportedVersion):  # any writer may have overwritten it, and it is only a hint
            return None

    def _record(self, seq: int) -> tuple[bytes, str, Commit] | None:
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
            raise CorruptRecord(f"commit {seq} in {self.store.url}: {error.message}") from None
        if commit.seq != seq:
            raise CorruptRecord(f"the record of commit {seq} in {self.store.url} is commit {commit.seq}.")
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
        """Check the run's name in a commit, which its signature covers. Commits of version 1 have no name."""
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
