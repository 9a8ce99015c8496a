"""Check a whole chain: every record, link and file, and with a deep check also every byte and every version."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

from ...errors import (
    ChainError,
    DataDamaged,
    DataMissing,
    DeltawireError,
    NoChain,
    RunMismatch,
    StoreError,
    UnsupportedVersion,
    VersionGone,
    WrongRun,
)
from ...format.records.record_parts import FileEntry
from ...format.records.version_records import Commit, Shortcut
from ...store import keys
from ...store.base import Store
from ..fetch import Fetcher
from ..log import ChainLog
from ..memory_state import MemoryState
from ..reader_options import ReaderOptions
from ..routes.rebuild import rebuild
from ..routes.remaining_routes import Routes
from ..routes.restore import Hop
from ..routes.walk_route import HopFailed, walk_route
from .deep_check import DeepCheck
from .superseded import Record, find_needed, live_checkpoints, target_seq
from .verify_channels import channel_problems
from .verify_report import NO_ROUTE, Problem, Report, ReportProgress


def verify(
    store: Store,
    deep: bool = False,
    progress: ReportProgress | None = None,
    *,
    options: ReaderOptions | None = None,
    threads: int | None = None,
) -> Report:
    """Check every commit, link, epoch and signature, and check that all files above the floor exist with their sizes.

    The checkpoint that the floor depends on must exist too, and so must everything else that a new reader needs for the newest version.
    Problems of the chain are reported, not raised. Problems of the store are raised. Raises `NoChain` if nothing is published.

    Damaged data that readers of the newest version do not need are reported as superseded, so a repaired chain is sound again. Damaged
    commits are never superseded, because readers follow hashes through them.

    Parameters
    ----------
    store
        The store that holds the chain.
    deep
        Whether to read every file, rebuild every version above the floor that can be rebuilt, and resolve every shortcut. This needs memory
        for one state.
    progress
        Called by a deep check with the number of commits done and the number of all commits.
    options
        Which chain to accept. Only `run`, `trusted_keys` and `limits` are used. Without `trusted_keys`, a chain whose first commit is
        signed must be signed by that key throughout.
    threads
        Number of threads for decoding and digests. None means one per core.
    """
    return _Check((options or ReaderOptions()).open_log(store), progress, threads).run(deep)


class _Check:
    def __init__(self, log: ChainLog, progress: ReportProgress | None, threads: int | None) -> None:
        self._log = log
        self._progress = progress
        self._threads = threads
        self._report = Report()
        self._sizes: dict[str, int] = {}
        self._sound: list[Commit] = []
        self._damage: list[tuple[Record, Problem]] = []
        """Records whose files are damaged, and the damage."""
        self._dangling: list[tuple[Shortcut, Problem]] = []
        """Shortcuts of earlier writers whose files are missing."""
        self._is_cut_off = False
        """Whether a commit is missing, so that the commits after it were not read."""

    def run(self, deep: bool) -> Report:
        self._refuse_other_run()
        self._trust_first_key()
        self._check_commits()
        self._check_stray_slots()
        self._report.floor = self._checked_floor()
        self._sizes = {info.key: info.size for info in self._log.store.list(keys.DATA)}
        for commit in self._sound:
            if commit.seq > self._report.floor:
                self._check_files(commit)
        shortcuts = self._check_shortcuts()
        checkpoint = self._floor_checkpoint(shortcuts)
        if checkpoint is not None:
            self._check_files(checkpoint)
        self._check_attachments(checkpoint, deep=deep)
        state = self._deep_check().run(shortcuts, checkpoint) if deep else None
        self._judge_damage(shortcuts)
        if self._sound:
            self._report.problems.extend(channel_problems(self._log, self._sound[-1]))
        is_reachable = self._check_route_for_new_readers(state)
        # A shortcut without files does no harm, unless it was the only route.
        (self._report.notes if is_reachable else self._report.problems).extend(problem for _, problem in self._dangling)
        return self._report

    def _deep_check(self) -> DeepCheck:
        return DeepCheck(self._log, self._sound, self._report, self._damaged, progress=self._progress, threads=self._threads)

    def _checked_floor(self) -> int:
        """Return the floor. A floor above the newest commit would hide all damage, so it is reported and ignored. Call it before listing
        the
        data.
        """
        floor, newest = self._log.floor(), self._report.commits - 1
        if floor <= newest:
            return floor
        self._problem(
            keys.MARKS.rstrip("/"),
            f"the newest mark deletes everything up to commit {floor}, but the newest commit is {newest}: no collector wrote it",
        )
        return -1

    def _floor_checkpoint(self, shortcuts: list[Shortcut]) -> Record | None:
        """Find the checkpoint that collection must have kept: the newest one at or below the floor in the history of the newest version."""
        candidates = live_checkpoints(self._sound, [*shortcuts, *(shortcut for shortcut, _ in self._dangling)])
        below = [record for record in candidates if target_seq(record) <= self._report.floor]
        dangling = {id(shortcut) for shortcut, _ in self._dangling}
        if below and id(below[0]) in dangling:
            # Then collection kept another one. If there is none, new readers have no route, which is reported with the shortcut.
            below = [record for record in below if all(self._what_is_wrong(entry) is None for entry in self._objects_of(record))]
        return below[0] if below else None

    def _newest_version(self) -> Commit | None:
        """Return the commit that made the newest version."""
        return next((commit for commit in reversed(self._sound) if commit.kind != "fence"), None)

    def _check_route_for_new_readers(self, state: MemoryState | None) -> bool:
        """Plan a route from nothing, as a new reader does, and check every file on it. With the `state` of a deep check, also take the
        route.

        Returns False if no route leads to the newest version.
        """
        target = self._newest_version()
        if target is None:
            return True
        routes = Routes(self._log)

        def look_at_files(hops: Sequence[Hop]) -> None:
            lost = [hop for hop in hops if any(self._what_is_wrong(entry) is not None for entry in hop.files)]
            for hop in lost[1:]:  # all at once, because finding a route takes long in a long chain
                routes.avoid(HopFailed(hop, VersionGone("files are lost")))
            if lost:
                raise HopFailed(lost[0], VersionGone("files are lost"))

        what = NO_ROUTE
        try:
            walk_route(routes, lambda: routes.find(None, target), look_at_files)
            if state is not None and (state.commit is None or state.commit.digest != target.digest):
                state.clear()
                rebuild(state, self._log, Fetcher(self._log.store, limits=self._log.limits, patience=0), target)
        except StoreError:
            raise
        except VersionGone:
            self._problem(target.describe(), what)
        except DeltawireError as error:  # often one that was already reported
            self._problem(target.describe(), what if self._report.problems else f"{what}. {error}")
        else:
            return True
        return False

    def _refuse_other_run(self) -> None:
        """Raise `RunMismatch` or `WrongRun` if this is not the run that the caller wants. This is not damage."""
        try:
            _ = self._log.run
        except RunMismatch:
            raise
        except (ChainError, UnsupportedVersion):
            return  # the check of the commits reports it
        try:
            self._log.read(0)
        except WrongRun:
            raise
        except (ChainError, UnsupportedVersion):
            return

    def _trust_first_key(self) -> None:
        with contextlib.suppress(ChainError, UnsupportedVersion):  # the check of the commits reports it
            self._log.trust_first_key()

    def _problem(self, where: str, what: object) -> None:
        self._report.problems.append(Problem(where, str(what)))

    def _damaged(self, record: Record, where: str, what: object) -> None:
        self._damage.append((record, Problem(where, str(what))))

    def _judge_damage(self, shortcuts: list[Shortcut]) -> None:
        """Separate damage that readers can meet from damage to superseded data."""
        damaged = {id(record) for record, _ in self._damage}
        needed = find_needed(self._sound, shortcuts, lambda record: id(record) in damaged)
        for record, problem in self._damage:
            (self._report.problems if needed.needs(record) else self._report.superseded).append(problem)

    def _check_commits(self) -> None:
        before: Commit | None = None
        for seq in itertools.count():
            key = keys.commit_key(seq)
            try:
                commit = self._log.read(seq)
            except (ChainError, UnsupportedVersion) as error:
                self._problem(key, error)
                self._report.commits += 1
                continue
            if commit is None:
                break
            self._report.commits += 1
            self._check_links(commit)
            if before is not None and commit.epoch < before.epoch:
                self._report.void += 1
                continue
            self._check_sequence(commit, before)
            self._sound.append(commit)
            self._report.versions += commit.kind != "fence"
            before = commit
        if not self._report.commits:
            raise NoChain(f"nothing is published at {self._log.store.url}.")

    def _check_links(self, commit: Commit) -> None:
        links = [] if commit.parent is None else [(commit.seq - 1, commit.parent), *commit.links]
        for seq, expected in links:
            try:
                found = self._log.hash(seq)
            except (ChainError, UnsupportedVersion):
                continue  # already reported for that commit
            if found != expected:
                self._problem(keys.commit_key(commit.seq), f"it links to a commit {seq} that is not the one in the chain")

    def _check_sequence(self, commit: Commit, before: Commit | None) -> None:
        """Check a commit against the newest one before it that is not void."""
        key = keys.commit_key(commit.seq)
        if commit.epoch != (before.epoch if before else None):
            if commit.kind != "fence":
                self._problem(key, f"epoch {commit.epoch} does not begin with a fence")
            if not self._exists(keys.epoch_key(commit.epoch)):
                self._problem(key, f"epoch {commit.epoch} was never claimed")
        if before is None:
            return
        if commit.updates != before.updates + (commit.kind != "fence"):
            self._problem(key, f"it counts {commit.updates} updates after {before.updates}")
        if commit.base is not None and commit.kind in ("fence", "delta") and commit.base != self._log.ref(before):
            self._problem(key, f"its base is not commit {before.seq}")
        if commit.kind == "fence" and commit.state_seq != before.state_seq:
            self._problem(key, f"it leaves commit {commit.state_seq} in force, not {before.state_seq}")
        if commit.kind == "rewind" and commit.base is not None:
            base = next((known for known in self._sound if known.seq == commit.base.seq), None)
            if base is None or self._log.ref(base) != commit.base:
                self._problem(key, f"its base is not the commit {commit.base.seq} of the chain")
        if commit.kind in ("fence", "delta") and (commit.tensors, commit.state_bytes) != (before.tensors, before.state_bytes):
            self._problem(key, "it has other tensors than its base")

    def _check_stray_slots(self) -> None:
        missing = self._report.commits
        later = sum(1 for _ in self._log.store.list(keys.COMMITS, after=keys.commit_key(missing - 1)))
        if later:
            self._is_cut_off = True
            self._problem(
                keys.commit_key(missing),
                f"commit {missing} is missing, but {later:,} later commit{' exists' if later == 1 else 's exist'}: no reader gets past it",
            )

    def _check_shortcuts(self) -> list[Shortcut]:
        by_seq = {commit.seq: commit for commit in self._sound}
        anchors, skips = self._log.shortcuts(None, 2**63 - 1)
        found = []
        names: list[tuple[int, int | None]] = [(seq, None) for seq in anchors]
        for seq, base in [*names, *skips]:
            key = keys.anchor_key(seq) if base is None else keys.skip_key(seq, base)
            self._report.shortcuts += 1
            try:
                shortcut = self._log.shortcut(seq, base)
            except (ChainError, UnsupportedVersion) as error:
                self._problem(key, error)
                continue
            if shortcut is None:  # deleted since it was listed
                continue
            ends = [shortcut.target] + ([shortcut.base] if shortcut.base else [])
            if self._is_cut_off and any(end.seq >= self._report.commits for end in ends):
                continue  # it leads to commits beyond the missing one
            if any(end.seq not in by_seq or self._log.ref(by_seq[end.seq]) != end for end in ends):
                self._problem(key, "it does not fit the commits of the chain")
                continue
            if self._is_dangling(shortcut):
                self._dangling.append((shortcut, Problem(key, "its files are missing")))
                continue
            if seq > self._report.floor:
                self._check_files(shortcut)
            found.append(shortcut)
        return found

    def _is_dangling(self, shortcut: Shortcut) -> bool:
        """Return whether an earlier writer made a shortcut whose files were collected before it wrote the record."""
        return shortcut.epoch < self._sound[-1].epoch and any(entry.key not in self._sizes for entry in self._objects_of(shortcut))

    def _check_files(self, record: Record) -> None:
        if record.file_list is not None and self._what_is_wrong(record.file_list.entry) is None:
            try:
                self._log.files_of(record)
            except (ChainError, UnsupportedVersion) as error:
                self._damaged(record, record.describe(), error)
        for entry in self._objects_of(record):
            self._report.files += 1
            self._report.bytes += entry.size
            what = self._what_is_wrong(entry)
            if what is not None:
                self._damaged(record, record.describe(), what)

    def _objects_of(self, record: Record) -> tuple[FileEntry, ...]:
        """Return the files of a record, and its file list. If the list cannot be read, only the list."""
        if record.file_list is None:
            return record.files
        try:
            return (record.file_list.entry, *self._log.files_of(record))
        except (ChainError, UnsupportedVersion):
            return (record.file_list.entry,)

    def _check_attachments(self, checkpoint: Record | None, *, deep: bool) -> None:
        """Check each attachment once, and name all versions that refer to it. Only those of the newest version count as problems."""
        newest = self._newest_version()
        in_force = set() if newest is None else {entry.key for entry in newest.attachments or ()}
        lowest = None if checkpoint is None else target_seq(checkpoint)
        named = [commit for commit in self._sound if commit.seq > self._report.floor or commit.seq == lowest or commit is newest]
        users: dict[str, tuple[FileEntry, list[Commit]]] = {}
        for commit in named:
            for entry in commit.attachments or ():
                users.setdefault(entry.key, (entry, []))[1].append(commit)
        fetcher = Fetcher(self._log.store, limits=self._log.limits, patience=0)
        for key, (entry, commits) in users.items():
            self._report.files += 1
            self._report.bytes += entry.size
            what = self._what_is_wrong(entry)
            if what is None and deep:
                try:
                    fetcher.fetch(entry)
                except (DataDamaged, DataMissing, VersionGone) as error:
                    what = str(error)
            if what is not None:
                found = self._report.problems if key in in_force else self._report.superseded
                found.append(Problem(_describe_all(commits), f"{entry.name}, which these versions need: {what}"))

    def _what_is_wrong(self, entry: FileEntry) -> str | None:
        if entry.key not in self._sizes:
            return f"{entry.key} is missing"
        if self._sizes[entry.key] != entry.size:
            return f"{entry.key} has {self._sizes[entry.key]:,} bytes, not {entry.size:,}"
        return None

    def _exists(self, key: str) -> bool:
        try:
            self._log.store.head(key)
        except (StoreError, DataDamaged):
            return False
        return True


def _describe_all(commits: list[Commit]) -> str:
    """Return the names of versions, as ranges where possible: "versions 1 to 6"."""
    if len(commits) == 1:
        return commits[0].describe()
    ranges: list[list[int]] = []
    for number in sorted({commit.updates for commit in commits if commit.kind != "fence"}):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return "versions " + ", ".join(" to ".join(map(str, each)) for each in ranges)
