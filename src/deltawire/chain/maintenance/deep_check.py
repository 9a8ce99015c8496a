"""The deep part of a check: rebuild every version from its files, and resolve every shortcut."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ...errors import ChainError, DeltawireError, StoreError, UnsupportedVersion, VersionGone
from ...format.records.version_records import Commit, Shortcut
from ..fetch import Fetcher
from ..log import ChainLog
from ..memory_state import MemoryState
from ..routes.rebuild import rebuild
from ..routes.restore import Hop
from .superseded import Record, target_seq
from .verify_report import Report, ReportProgress


class DeepCheck:
    """Reads every file of the sound commits. Counts rebuilt versions in `report`, and calls `damaged` for each record that is damaged."""

    def __init__(
        self,
        log: ChainLog,
        sound: Sequence[Commit],
        report: Report,
        damaged: Callable[[Record, str, object], None],
        *,
        progress: ReportProgress | None,
        threads: int | None,
    ) -> None:
        self._log = log
        self._sound = sound
        self._report = report
        self._damaged = damaged
        self._progress = progress
        self._threads = threads

    def run(self, shortcuts: list[Shortcut], checkpoint: Record | None) -> MemoryState:
        """Rebuild all versions in order, each from its own files if possible, so that all files are read.

        Starts with `checkpoint`, the one that the floor depends on. Returns the last state that could be rebuilt.
        """
        fetcher = Fetcher(self._log.store, limits=self._log.limits, patience=0)
        state = MemoryState(threads=self._threads)
        for done, commit in enumerate(self._sound, 1):
            if checkpoint is not None and commit.seq == target_seq(checkpoint):
                self._report.rebuilt += self._load(state, checkpoint, commit, fetcher)
            elif commit.seq > self._report.floor and commit.digest is not None:
                self._rebuild(state, commit, fetcher)
            if state.commit is commit:
                for shortcut in shortcuts:
                    if shortcut.base is not None and shortcut.base.seq == commit.seq:
                        self._try_shortcut(state, shortcut, fetcher)
            if self._progress:
                self._progress(done, len(self._sound))
        for shortcut in shortcuts:
            if shortcut.base is None and shortcut.target.seq > self._report.floor:
                self._try_shortcut(MemoryState(threads=self._threads), shortcut, fetcher)
        return state

    def _rebuild(self, state: MemoryState, commit: Commit, fetcher: Fetcher) -> None:
        at_base = commit.base is not None and state.commit is not None and state.commit.seq == commit.base.seq
        if commit.kind == "fence":
            if at_base:
                state.relabel(commit)
            return
        if commit.kind == "anchor":
            rebuilt = self._load(state, commit, commit, fetcher)
        elif commit.kind == "delta" and commit.base is not None and at_base:
            base = commit.base

            def resolve() -> None:
                hop = Hop(commit, base.seq, self._log.files_of(commit, fetcher=fetcher), "commit", base.digest)
                state.apply(state.resolve(hop, fetcher), commit)

            rebuilt = self._attempt(commit, resolve)
        else:
            rebuilt = self._attempt(commit, lambda: rebuild(state, self._log, fetcher, commit))
        self._report.rebuilt += rebuilt

    def _try_shortcut(self, state: MemoryState, shortcut: Shortcut, fetcher: Fetcher) -> None:
        target = next(commit for commit in self._sound if commit.seq == shortcut.target.seq)
        base = shortcut.base
        if base is None:
            self._load(state, shortcut, target, fetcher)
        elif target.seq > self._report.floor:

            def resolve() -> None:
                state.resolve(Hop(target, base.seq, self._log.files_of(shortcut, fetcher=fetcher), "skip", base.digest, shortcut), fetcher)

            self._attempt(shortcut, resolve)

    def _load(self, state: MemoryState, record: Record, target: Commit, fetcher: Fetcher) -> bool:
        """Load a checkpoint of `target`, and also read its other files, which a state does not need."""
        try:
            files = self._log.files_of(record, fetcher=fetcher)
        except (ChainError, UnsupportedVersion):
            return False  # the check of the files has reported it
        hop = Hop(target, None, files, "anchor", shortcut=record if isinstance(record, Shortcut) else None)
        others = [entry for entry in hop.files if entry.name is not None and not entry.name.endswith(".safetensors")]
        intact = [self._attempt(record, functools.partial(fetcher.fetch, entry)) for entry in others]
        return self._attempt(record, lambda: state.load_anchor(hop, fetcher)) and all(intact)

    def _attempt(self, record: Record, work: Callable[[], object]) -> bool:
        try:
            work()
        except VersionGone:
            return False  # it lies above the floor, but it is made from data below the floor, which were collected
        except StoreError:
            raise
        except DeltawireError as error:
            self._damaged(record, record.describe(), error)
            return False
        return True
