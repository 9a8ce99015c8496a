"""Follow a chain: keep the newest version of the model in memory or in a mirror directory."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from ..chain.channels import move_fields
from ..chain.fetch import Fetcher
from ..chain.reader_options import ReaderOptions
from ..chain.routes.remaining_routes import Routes
from ..chain.version import Version
from ..errors import ChainError, ChainStale, DeltawireError
from ..events import OnEvent, emit
from ..format.records.channel_records import ChannelMove
from ..format.records.record_parts import FileEntry
from ..format.records.run_records import Run
from ..format.records.version_records import Commit
from ..store import Store
from ..store.copies.locations import Location
from ..telemetry.trace_context import traced
from .cache.host_cache import open_host_cache
from .chain_view import ChainView
from .files_ahead import FilesAhead
from .follow import follow_chain
from .memory_replica import MemoryReplica
from .mirror.mirror_replica import MirrorReplica
from .pin_keeper import PinKeeper
from .replica import Replica
from .sync_context import SyncContext
from .sync_report import SyncReport

_MOST_MOVES = 8
"""A sync follows a channel that is moved meanwhile this many times. The next sync continues."""


class Subscriber:
    """Keeps a replica of the model at the newest version of a chain, bit for bit. Every update is checked.

    >>> with Subscriber("s3://bucket/run", mirror="/dev/shm/policy") as subscriber:
    ...     subscriber.sync().step
    ...     subscriber.state["lm_head.weight"]

    Without `mirror` the weights are arrays in memory, which `sync` **changes in place**. Code that reads them during a sync may see a mix
    of two versions, so stop reading first. With a mirror the weights are memory-mapped files, which do not change until this subscriber's
    next `sync`. Do not use arrays from `state` after that sync. A mirror survives the process, can be opened without the store, can be
    shared by subscribers in several processes, and can be loaded as a checkpoint at any time (`reading_mirror`).

    If a sync fails, the last good version stays available: `version` and `state` describe it, and `last_error` says why it is not newer.

    Parameters
    ----------
    url
        The location of the chain: a URL, a path, or an open store, which stays open after `close`. Or a list of them: the origin, and
        copies that relays keep, from which the reader reads if they are nearer.
    mirror
        The directory of the mirror. None keeps the weights in memory.
    options
        Which chain to accept and how to read it.
    threads
        Number of threads for decoding and digests. None means one per core.
    undo_bytes
        Bytes of memory for going back to earlier versions without the store. None uses a quarter of the state's size. A mirror does not use
        it.
    replica
        The replica to keep up to date instead of memory or a mirror, such as the live weights of an engine.
    on_event
        Called with each event, from the thread in which it happens.
    """

    def __init__(
        self,
        url: Location,
        mirror: Path | str | None = None,
        *,
        options: ReaderOptions | None = None,
        threads: int | None = None,
        undo_bytes: int | None = None,
        replica: Replica | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._options = options = options or ReaderOptions()
        self.last_error: Exception | None = None
        """The error of the last sync, or None if it succeeded."""
        self._on_event = on_event
        self._busy = threading.RLock()
        self._closed = threading.Event()
        self._owns_store = not isinstance(url, Store)
        self._store = options.open_store(url, on_event=on_event)
        log = options.open_log(self._store)
        self._pins = PinKeeper(self._store, options.reader, enabled=options.pin, on_event=on_event)
        self._shared = open_host_cache(options, on_event)
        self._replica: Replica
        self._mirrored: MirrorReplica | None = None
        if replica is not None:
            self._replica = replica
            self._mirrored = replica.mirror
        elif mirror is None:
            self._replica = MemoryReplica(threads=threads, undo_bytes=undo_bytes)
        else:  # last, because it takes a lock, and everything that can fail must come before
            self._replica = self._mirrored = MirrorReplica(Path(mirror), threads=threads, trusted_keys=options.trusted_keys)
        if self._mirrored is not None:
            self._mirrored.bind(options.channel)
        log.followed_run = None if self._mirrored is None else self._mirrored.run_id
        # Announced files are of a version that is on no channel yet, so a follower of a channel does not look for them.
        self._ahead = FilesAhead(log, options.ahead_bytes if options.channel is None else 0, shared=self._shared)
        seen = self._mirrored.seen if self._mirrored else None
        self._chain = ChainView(log, seen=seen, max_silence=options.max_silence, channel=options.open_channel(log))

    @property
    def state(self) -> Mapping[str, NDArray[Any]]:
        """The weights of `version`: names to read-only arrays (bf16 and fp8 as `ml_dtypes`). Empty before the first version.

        Read this property again after each sync, because the mapping may be a new one.
        """
        return self._replica.state

    @property
    def version(self) -> Version | None:
        """The complete version that the subscriber has, or None before the first."""
        commit = self._replica.commit
        return None if commit is None else Version.of(commit)

    @property
    def path(self) -> Path | None:
        """The directory of the mirror that holds `version` as a checkpoint, or None without a mirror. It does not change until the next
        `sync`.
        """
        return self._mirrored.slot_path if self._mirrored else None

    def lag(self) -> int:
        """Return how many versions the subscriber is behind the chain, or behind or ahead of its channel.

        Asks the store, and raises the errors of `sync`.
        """
        target = self._chain.target()
        commit = self._replica.commit
        return abs(target.updates - (commit.updates if commit is not None else 0))

    def sync(self, *, seq: int | None = None) -> Version:
        """Bring the replica to the newest version, to the one that its channel names, or to another one. Return the version that it then
        has.

        Raises a `StoreError` or `ChainError` if the version cannot be reached, and `MirrorError` if the directory cannot be used.
        `ChainStale` is also raised after the version was reached.

        Parameters
        ----------
        seq
            The number of the version's commit, `Version.seq`. It is not the version number that `deltawire log` shows. The version may be
            older than the present one, and need not be on the channel. None means the newest version, or the version that the channel
            names. In a shared mirror, this moves the mirror for all its users.
        """
        with self._busy:
            if self._closed.is_set():
                raise ValueError("the subscriber is closed")
            report = SyncReport(self._ahead.holds)
            before, moved = self._replica.commit, self._chain.move
            try:
                with report.watch.phase("total"):
                    self._move(seq, report)
                newest = self._chain.newest()
                self._ahead.keep_only(None if newest is None else self._chain.log.ref(newest[0]))
                self._chain.check_silence()
                self.last_error = None
            except Exception as error:
                self.last_error = error
                if isinstance(error, ChainError):
                    self._chain.log.forget()
                self._emit_failure(error)
                raise
            finally:
                report.shared_bytes = 0 if self._shared is None else self._shared.take_count()
                self._emit_move(moved)
                self._emit_change(before, report)
            version = self.version
            assert version is not None
            return version

    def follow(
        self, callback: Callable[[Version], object] | None = None, *, poll: float = 1.0, stop: threading.Event | None = None
    ) -> Iterator[Version]:
        """Keep up with the chain. Yields the version after every sync that changed it. Versions in between may be skipped.

        Looks for the next commit about every `poll` seconds. Retryable errors are reported as events "sync-failed" and tried again, with
        growing pauses; other errors are raised. Ends when `stop` is set or the subscriber is closed.

        Parameters
        ----------
        callback
            Called with each version. If it is given, `follow` returns only at the end. Its exceptions are raised.
        poll
            Seconds between two looks.
        stop
            Ends the loop when it is set.
        """
        versions = follow_chain(self, poll=poll, is_over=lambda: self._closed.is_set() or (stop is not None and stop.is_set()), stop=stop)
        if callback is None:
            return versions
        for version in versions:
            callback(version)
        return iter(())

    def close(self) -> None:
        """Release the pin, the mirror and the store. Do not use arrays from a mirror's `state` afterwards. May be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._busy:
            self._ahead.close()
            self._pins.release()
            self._replica.close()
            if self._owns_store:
                self._store.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _move(self, seq: int | None, report: SyncReport) -> None:
        with report.watch.phase("find"):
            run = self._chain.log.run
            if self._mirrored is not None and self._mirrored.run_id is not None:
                self._mirrored.create(run.id)  # raises an error if the mirror has another run
        for _ in range(_MOST_MOVES):
            before = self._replica.commit
            self._chain.reach(seq, lambda commit: self._move_to(commit, run, report, newest=seq is None), watch=report.watch)
            if seq is not None or self._replica.commit == before or not self._chain.is_left():
                break

    def _move_to(self, commit: Commit, run: Run, report: SyncReport, *, newest: bool) -> None:
        if self._mirrored is not None and self._mirrored.run_id is None:  # not earlier, because the chain might have been refused
            self._mirrored.create(run.id)
            self._chain.remember()
        have = self._replica.commit
        if have == commit:
            self._pins.hold(run, commit.seq)
            return
        self._ahead.stop()
        fetcher = Fetcher(
            self._chain.log.store,
            limits=self._chain.log.limits,
            patience=self._options.patience,
            watch=report.watch,
            on_event=self._on_event,
            is_stopped=self._closed.is_set,
            shared=self._shared,
        )
        routes = Routes(self._chain.log, fetcher=fetcher, on_event=self._on_event)
        if have is None:
            self._pins.hold_route(run, routes.find(None, commit))
        else:
            self._pins.hold(run, have.seq)
        context = SyncContext(
            self._chain.log,
            routes,
            report,
            newest=newest and self._options.channel is None,
            check_wanted=self._chain.check_wanted if newest else lambda: None,
            in_one=newest and self._options.channel is not None,
            patience=self._options.patience,
            progress=self._pins.renew,
            ahead=self._ahead,
            on_event=self._on_event,
            is_halted=self._closed.is_set,
            shared=self._shared,
        )
        self._replica.move(commit, context)

    def _look(self) -> bool:
        """Return whether there may be a new version, for `follow`. Keeps the pin alive, and reports errors."""
        try:
            commit = self._replica.commit
            if commit is not None:
                self._pins.hold(self._chain.log.run, commit.seq)
            if self._chain.has_news():
                return True
            self._look_ahead()
            self._chain.check_silence()
        except DeltawireError as error:
            if not (isinstance(error, ChainStale) and isinstance(self.last_error, ChainStale)):  # silence is reported once
                self._emit_failure(error)
            self.last_error = error
            raise
        self.last_error = None
        return False

    def _look_ahead(self) -> None:
        """Begin to fetch what is announced of the next version. Takes one small request. Call it when nothing newer is committed."""
        newest = self._chain.newest()
        if newest is not None and newest[1] == self._replica.commit and self._replica.wants_ahead():
            self._ahead.look(*newest)

    def _use_ahead(self, until: float = math.inf) -> bool:
        """Prepare for the next version with files that have arrived ahead of its commit, until a time of `time.monotonic`.

        Returns whether more are on their way. Does nothing while a sync runs.
        """
        if self._busy.acquire(blocking=False):
            try:
                self._replica.take_ahead(_until(until, self._ahead.arrived(self._replica.commit)))
            finally:
                self._busy.release()
        return self._ahead.is_arriving

    def _emit_failure(self, error: Exception) -> None:
        commit = self._replica.commit
        retryable = isinstance(error, DeltawireError) and error.retryable
        seq = None if commit is None else commit.seq
        emit(self._on_event, "sync-failed", error=type(error).__name__, reason=str(error), retryable=int(retryable), seq=seq)

    def _emit_move(self, before: ChannelMove | None) -> None:
        move = self._chain.move
        if move is not None and move != before:
            emit(self._on_event, "channel-moved", **move_fields(move))

    def _emit_change(self, before: Commit | None, report: SyncReport) -> None:
        now = self._replica.commit
        if now is None or now == before:
            return
        if report.resynced:
            emit(self._on_event, "resynced", seq=now.seq, updates=now.updates, bytes=report.bytes)
        if before is not None and (now.seq < before.seq or now.kind == "rewind"):
            emit(self._on_event, "rolled-back", seq=now.seq, from_seq=before.seq)
        lag = self._chain.updates_known() - now.updates
        fields = {**report.fields(), **traced(now.meta)}
        emit(self._on_event, "synced", seq=now.seq, step=now.step, updates=now.updates, lag=max(0, lag), **fields)


def _until(end: float, files: Iterator[tuple[FileEntry, memoryview]]) -> Iterator[tuple[FileEntry, memoryview]]:
    """Yield files until a time of `time.monotonic`."""
    while time.monotonic() < end and (found := next(files, None)) is not None:
        yield found
