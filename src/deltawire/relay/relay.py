"""A relay: keeps a copy of a chain in the store of another region."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ..chain.reader_options import ReaderOptions
from ..chain.records.published_relays import publish_relay, remove_relay
from ..chain.uptime import uptime
from ..chain.version import Version
from ..errors import BadUrl, DeltawireError, SpoolError
from ..events import OnEvent, emit
from ..store import Progress, Store, open_store
from ..store.keys import relay_key
from ..subscribe.follow import pause
from ..subscribe.mirror.mirror import Mirror
from ..subscribe.pin_keeper import PinKeeper
from .announcement_copy import AnnouncementCopy
from .channel_copy import ChannelCopy
from .data_copy import DataCopy
from .shortcut_copy import ENDING, ShortcutCopy
from .version_copy import VersionCopy

_SLICE = 0.2
_PUBLISH_EVERY = 600.0


class Relay:
    """Copies a chain to a store in another region, and keeps the copy up to date. Readers of that region then read from that store.

    >>> with Relay("s3://us/run-7", "s3://eu/run-7") as relay:
    ...     for version in relay.follow():
    ...         print(version.step)

    The copy is the same chain, byte for byte. Data come before commits, so readers of the copy never see half a version. A relay can be
    killed at any time; the next one continues. The source of a relay may itself be the target of another. Full checkpoints and skips that
    the trainer makes later do not cross the link: the relay makes the same files from what the region has.

    Parameters
    ----------
    source
        The location of the chain to copy: a URL, a path, or an open store, which stays open after `close`.
    target
        The location of the copy. Only relays write there.
    options
        Which chain to accept, and how to read it. `reader` names the relay's pin at the source. `store` says how to reach the source.
    mirror
        A directory for a replica of the model, from which full checkpoints and skips are made. None keeps the replica in memory.
    spool
        A directory for large objects in transit. If a relay is killed, the next one with the same directory continues their transfer.
        None uses a temporary directory.
    shortcuts
        The shortcuts to make in the region: "all", "anchors" for full checkpoints only, or "none", which needs no replica.
    publish_as
        A name under which the run says where the copy is, for readers that look for relays. It is removed again by `close`.
    threads
        Number of threads for decoding and encoding. None means one per core.
    progress
        Called with the number of bytes of data that were read from the source.
    on_event
        Called with each event, from the thread in which it happens.
    """

    def __init__(
        self,
        source: str | Path | Store,
        target: str | Path | Store,
        *,
        options: ReaderOptions | None = None,
        mirror: Path | str | None = None,
        spool: Path | str | None = None,
        shortcuts: str = "all",
        publish_as: str | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        if shortcuts not in ("all", "anchors", "none"):
            raise ValueError(f"shortcuts must be 'all', 'anchors' or 'none', not {shortcuts!r}")
        if spool is not None and Path(spool).exists() and not Path(spool).is_dir():  # now, because the first large object may come late
            raise SpoolError(f"{spool} is a file.", hint="Name a directory for objects in transit.")
        self._options = options = options or ReaderOptions()
        self._on_event = on_event
        self._closed = threading.Event()
        self._owned: list[Store] = []
        self._source = self._open(source, options)
        self._target = self._open(target, dataclasses.replace(options, store=None))
        refuse_same_location(source, self._source, target, self._target)
        log = options.open_log(self._source)
        self._pins = PinKeeper(self._source, options.reader, enabled=options.pin, on_event=on_event)
        self._data = DataCopy(
            self._source,
            self._target,
            spool=None if spool is None else Path(spool),
            patience=options.patience,
            progress=lambda count: self._count(count, progress),
            is_stopped=self._closed.is_set,
            on_event=on_event,
        )
        self._versions = VersionCopy(log, self._target, self._data, self._pins, on_event=on_event)
        self._channels = ChannelCopy(log, self._target, self._versions.copy_version, on_event=on_event)
        self._announcements = AnnouncementCopy(log, self._target, self._data)
        self._shortcuts = None
        if mirror is not None:
            Mirror(Path(mirror)).refuse_occupied()  # now, because the first shortcut may be due much later
        if shortcuts != "none":
            self._shortcuts = ShortcutCopy(
                log,
                self._target,
                self._data,
                options=options,
                mirror=None if mirror is None else Path(mirror),
                with_skips=shortcuts == "all",
                threads=threads,
                is_stopped=self._closed.is_set,
                on_event=on_event,
            )
        self._name = publish_as
        self._publish_again_at: float | None = None
        if publish_as is not None:
            relay_key(publish_as)  # raises ValueError for an invalid name
        self._busy = threading.Lock()

    @property
    def version(self) -> Version | None:
        """The newest version that the region has, as far as this relay knows. None before the first."""
        return None if self._versions.version is None else Version.of(self._versions.version)

    @property
    def bytes_read(self) -> int:
        """The bytes of data objects that this relay has copied from its source."""
        return self._data.traffic.bytes

    def copy(self) -> int:
        """Copy all commits that the region lacks, with their data, and return their number.

        Raises `RelayConflict` if the target holds another chain, `NoChain` if nothing is published, and the errors that a reader of the
        source gets. After an error the region has a shorter copy of the chain; the next call continues.
        """
        with self._busy:
            copied = self._versions.copy()
            self._copy_moves()
            self._publish()
            return copied

    def copy_moves(self) -> int:
        """Copy moves of channels that the region lacks, and return their number. `copy` does it, too; call it while that has nothing to do.

        Raises `RelayConflict` if the region has another move, and the errors of the stores.
        """
        with self._busy:
            return self._copy_moves()

    def _copy_moves(self) -> int:
        newest = self._versions.newest
        return 0 if newest is None else self._channels.copy(newest)

    def copy_announced(self) -> bool:
        """Copy files of the next version that are announced before its commit exists. Return whether there were any. Raises nothing.

        Call it while `copy` has nothing to do.
        """
        with self._busy:
            head = self._versions.head_in_force()
            return head is not None and self._announcements.copy(head)

    def copy_shortcuts(self) -> int:
        """Make the full checkpoints and skips that the source has and the region lacks, and return their number. Call it after `copy`.

        A shortcut that cannot be made is reported as an event "shortcut-failed", and tried again by the next call.
        """
        newest = self._versions.newest
        return 0 if self._shortcuts is None or newest is None else self._shortcuts.copy(newest.seq)

    def follow(self, *, poll: float = 1.0, stop: threading.Event | None = None) -> Iterator[Version]:
        """Keep the copy up to date. Yields the newest version of the region after every change of it.

        Shortcuts are made on a thread of their own, so that versions do not wait for them. Retryable errors are reported as events
        "relay-failed" and tried again, with growing pauses; other errors are raised. Ends when `stop` is set or the relay is closed.

        Parameters
        ----------
        poll
            Seconds between two looks at the source.
        stop
            Ends the loop when it is set.
        """
        if poll <= 0:
            raise ValueError(f"poll must be more than 0 seconds, not {poll}")
        return self._follow(poll, stop or threading.Event())

    def _follow(self, poll: float, stop: threading.Event) -> Iterator[Version]:
        failures = 0
        is_due = True
        served: Version | None = None
        due = threading.Event()
        ended = threading.Event()
        thread = threading.Thread(target=self._make_shortcuts, args=(due, ended), name="deltawire-relay-shortcuts", daemon=True)
        thread.start()
        try:
            while not stop.is_set() and not self._closed.is_set():
                try:
                    if is_due or self._versions.has_news():
                        is_due = True  # until the copy succeeds
                        self.copy()
                        is_due = False
                        due.set()
                    elif (newest := self._versions.newest) is not None:
                        self._pins.hold(self._versions.log.run, newest.seq)
                        self.copy_moves()
                        self.copy_announced()
                    failures = 0
                except DeltawireError as error:
                    retryable = error.retryable
                    emit(self._on_event, "relay-failed", error=type(error).__name__, reason=str(error), retryable=int(retryable))
                    if not retryable:
                        raise
                    failures += 1
                    self._versions.log.forget()
                version = self.version
                if version is not None and version != served:
                    served = version
                    yield version
                seconds = pause(poll, failures)
                while seconds > 0 and not stop.is_set() and not self._closed.is_set():
                    stop.wait(min(seconds, _SLICE))
                    seconds -= _SLICE
        finally:
            ended.set()
            due.set()
            if self._shortcuts is not None:
                self._shortcuts.stop()
            thread.join(ENDING)  # it may be in the middle of a large file; nothing refers to an unfinished shortcut

    def _make_shortcuts(self, due: threading.Event, ended: threading.Event) -> None:
        while not ended.is_set() and not self._closed.is_set():
            if not due.wait(_SLICE):
                continue
            due.clear()
            try:
                self.copy_shortcuts()
            except DeltawireError as error:
                emit(self._on_event, "shortcut-failed", kind="shortcut", reason=str(error))

    def close(self) -> None:
        """End what is under way, and release the pin and the stores. May be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._data.close()
        if self._shortcuts is not None:
            self._shortcuts.close()
        self._pins.release()
        if self._name is not None and self._publish_again_at is not None:
            with contextlib.suppress(DeltawireError):  # readers find out that nothing is there
                remove_relay(self._source, self._name)
        for store in self._owned:
            store.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _publish(self) -> None:
        """Say in the run where the copy is, now and again every ten minutes, in case somebody has removed it."""
        if self._name is None or (self._publish_again_at is not None and uptime() < self._publish_again_at):
            return
        publish_relay(self._source, self._versions.log.run, self._name, self._target.url)
        self._publish_again_at = uptime() + _PUBLISH_EVERY

    def _open(self, url: str | Path | Store, options: ReaderOptions) -> Store:
        store = open_store(url, options=options.store, on_event=self._on_event)
        if store is not url:
            self._owned.append(store)
        return store

    def _count(self, count: int, progress: Progress | None) -> None:
        self._pins.renew()
        if progress is not None:
            progress(count)


def refuse_same_location(source: str | Path | Store, opened: Store, target: str | Path | Store, copy: Store) -> None:
    """Raise `BadUrl` if two names surely mean the same location. Open stores may have equal URLs and differ, and so may two endpoints.

    Parameters
    ----------
    source, target
        The names.
    opened, copy
        The stores at these locations.
    """
    is_same = opened is copy
    if not isinstance(source, Store) and not isinstance(target, Store):
        is_same = is_same or (opened.url == copy.url and ("?" not in f"{source}{target}" or str(source) == str(target)))
    if is_same:
        raise BadUrl(f"a relay cannot copy {opened.url} to itself.", hint="Name a location of its own for the copy.")
