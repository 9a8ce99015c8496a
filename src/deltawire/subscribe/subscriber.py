"""Follow a chain: the newest version of the model, in memory or in a mirror directory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from ..chain.reader_options import ReaderOptions
from ..chain.routes import Routes
from ..chain.version import Version
from ..errors import ChainError, ChainStale, DeltawireError
from ..events import OnEvent, emit
from ..format.records.chain_records import Commit, Run
from ..store import Store, open_store
from .chain_view import ChainView
from .follow import follow_chain
from .memory_replica import MemoryReplica
from .mirror.mirror_replica import MirrorReplica
from .pin_keeper import PinKeeper
from .replica import Replica
from .sync_context import SyncContext
from .sync_report import SyncReport


class Subscriber:
    """A copy of the model that is brought to the versions of a chain, bit for bit, and checked each time.

    >>> with Subscriber("s3://bucket/run", mirror="/dev/shm/policy") as subscriber:
    ...     subscriber.sync().step
    ...     subscriber.state["lm_head.weight"]

    Without `mirror` the weights are arrays in memory, **changed in place by `sync`**: who reads them while a sync runs may see a mix of two
    versions, so stop reading first. With a mirror they are memory-mapped files that stay exactly as they are until this subscriber's next
    `sync`, whatever others do; arrays taken from `state` before must not be used after it. A mirror outlives the process (opening it needs
    no store), can be shared by subscribers in any number of processes, and loads as a checkpoint at any time (`reading_mirror`).

    Whatever fails, the last good version goes on being served: `version` and `state` say what it is, `last_error` why it is not newer.

    Parameters
    ----------
    url
        The location of the chain: a URL, a path, or an open store, which stays open after `close`.
    mirror
        The directory of the mirror. None keeps the weights in memory.
    options
        Which chain to accept and how to read it.
    threads
        How many threads decode and check. None uses all processors.
    undo_bytes
        Bytes of memory for going back to earlier versions without the store. None uses a quarter of the state's size. A mirror does not
        use it.
    replica
        The replica to keep up to date instead of memory or a mirror, such as the live weights of an engine.
    on_event
        Called with each event, from the thread in which it happens.
    """

    def __init__(
        self,
        url: str | Path | Store,
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
        """Why the last sync failed; None if it did not."""
        self._on_event = on_event
        self._busy = threading.RLock()
        self._closed = threading.Event()
        self._owns_store = not isinstance(url, Store)
        self._store = open_store(url, options=options.store, on_event=on_event)
        log = options.open_log(self._store)
        self._pins = PinKeeper(self._store, options.reader, enabled=options.pin, on_event=on_event)
        self._replica: Replica
        self._mirrored: MirrorReplica | None = None
        if replica is not None:
            self._replica = replica
            self._mirrored = replica.mirror
        elif mirror is None:
            self._replica = MemoryReplica(threads=threads, undo_bytes=undo_bytes)
        else:  # after all that can fail, for it holds a lock from here on
            self._replica = self._mirrored = MirrorReplica(Path(mirror), threads=threads, trusted_keys=options.trusted_keys)
        log.followed_run = None if self._mirrored is None else self._mirrored.run_id
        self._chain = ChainView(log, seen=self._mirrored.seen if self._mirrored else None, max_silence=options.max_silence)

    @property
    def state(self) -> Mapping[str, NDArray[Any]]:
        """The weights of `version`: names to read-only arrays (bf16 and fp8 as `ml_dtypes`). Empty before the first version.

        Take it anew after each sync: one that needed a whole checkpoint, and any with a mirror, leaves another mapping.
        """
        return self._replica.state

    @property
    def version(self) -> Version | None:
        """The version at hand, whole; None before the first."""
        commit = self._replica.commit
        return None if commit is None else Version.of(commit)

    @property
    def path(self) -> Path | None:
        """With a mirror, the directory that holds `version` as a checkpoint. It stays as it is until the next `sync`."""
        return self._mirrored.slot_path if self._mirrored else None

    def lag(self) -> int:
        """How many versions the chain has beyond the one at hand, by asking the store now. Raises what `sync` raises on the way there."""
        head = self._chain.head()
        commit = self._replica.commit
        return head.updates - (commit.updates if commit is not None else 0)

    def sync(self, target: int | None = None) -> Version:
        """Get to the newest version, or to version `target`, which may be an older one. Returns the version that is then at hand.

        Raises a `StoreError` or `ChainError` if it cannot be reached, `MirrorError` if the directory cannot be used; `ChainStale` also
        after it was reached. With a shared mirror, `target` moves the mirror for everyone who syncs it.
        """
        with self._busy:
            if self._closed.is_set():
                raise ValueError("the subscriber is closed")
            report = SyncReport()
            before = self._replica.commit
            try:
                with report.watch.phase("total"):
                    self._move(target, report)
                self._chain.check_silence()
                self.last_error = None
            except Exception as error:
                self.last_error = error
                if isinstance(error, ChainError):
                    self._chain.log.forget()
                self._emit_failure(error)
                raise
            finally:
                self._emit_change(before, report)
            version = self.version
            assert version is not None
            return version

    def follow(
        self, callback: Callable[[Version], object] | None = None, *, poll: float = 1.0, stop: threading.Event | None = None
    ) -> Iterator[Version]:
        """Keep up with the chain. Yields the version after every sync that changed it; versions in between are passed over.

        Looks for the next commit about every `poll` seconds, by name. What may heal by itself (`retryable` errors) is reported as an event
        "sync-failed" and tried again, ever more slowly; anything else is raised. Ends when `stop` is set or the subscriber is closed.
        With a `callback`, calls it with each version and returns only in the end; what it raises is raised.
        """
        versions = follow_chain(self, poll=poll, is_over=lambda: self._closed.is_set() or (stop is not None and stop.is_set()), stop=stop)
        if callback is None:
            return versions
        for version in versions:
            callback(version)
        return iter(())

    def close(self) -> None:
        """Let go of pin, mirror and store. Arrays taken from a mirror's `state` must not be used any more. Doing so twice is fine."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._busy:
            self._pins.release()
            self._replica.close()
            if self._owns_store:
                self._store.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _move(self, target: int | None, report: SyncReport) -> None:
        with report.watch.phase("find"):
            run = self._chain.log.run
            if self._mirrored is not None and self._mirrored.run_id is not None:
                self._mirrored.create(run.id)  # or it is of another run
        self._chain.reach(target, lambda commit: self._move_to(commit, run, report, newest=target is None), watch=report.watch)

    def _move_to(self, commit: Commit, run: Run, report: SyncReport, *, newest: bool) -> None:
        if self._mirrored is not None and self._mirrored.run_id is None:  # only now is it known that the chain is to be followed
            self._mirrored.create(run.id)
            self._chain.remember()
        have = self._replica.commit
        if have == commit:
            self._pins.hold(run, commit.seq)
            return
        routes = Routes(self._chain.log, on_event=self._on_event)
        if have is None:
            self._pins.hold_route(run, routes.find(None, commit))
        else:
            self._pins.hold(run, have.seq)
        context = SyncContext(
            self._chain.log,
            routes,
            report,
            newest=newest,
            patience=self._options.patience,
            progress=self._pins.renew,
            on_event=self._on_event,
            is_halted=self._closed.is_set,
        )
        self._replica.move(commit, context)

    def _look(self) -> bool:
        """For `follow`: whether there may be something new. Keeps the pin alive, and reports what goes wrong."""
        try:
            commit = self._replica.commit
            if commit is not None:
                self._pins.hold(self._chain.log.run, commit.seq)
            if self._chain.has_news():
                return True
            self._chain.check_silence()
        except DeltawireError as error:
            if not (isinstance(error, ChainStale) and isinstance(self.last_error, ChainStale)):  # silence is reported once
                self._emit_failure(error)
            self.last_error = error
            raise
        self.last_error = None
        return False

    def _emit_failure(self, error: Exception) -> None:
        commit = self._replica.commit
        retryable = isinstance(error, DeltawireError) and error.retryable
        seq = None if commit is None else commit.seq
        emit(self._on_event, "sync-failed", error=type(error).__name__, reason=str(error), retryable=int(retryable), seq=seq)

    def _emit_change(self, before: Commit | None, report: SyncReport) -> None:
        now = self._replica.commit
        if now is None or now == before:
            return
        if report.resynced:
            emit(self._on_event, "resynced", seq=now.seq, updates=now.updates, bytes=report.bytes)
        if before is not None and (now.seq < before.seq or now.kind == "rewind"):
            emit(self._on_event, "rolled-back", seq=now.seq, from_seq=before.seq)
        lag = self._chain.updates_known() - now.updates
        emit(self._on_event, "synced", seq=now.seq, step=now.step, updates=now.updates, lag=max(0, lag), **report.fields())
