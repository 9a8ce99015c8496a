"""Read a chain from several stores: the origin, and copies of it that relays keep (docs/protocol.md §11).

All writes go to the origin, and so does everything that is not part of the copies. A copy is never trusted further than the origin: data
have their hash in the key, and records are compared with the origin's unless the reader checks their signatures. A copy that fails, lags
or serves something wrong is left alone for a while, and the origin answers instead.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from ...errors import DataDamaged, DeltawireError, ObjectMissing, StoreError
from ...events import OnEvent, emit
from .. import keys
from ..base import ObjectInfo, Progress, Store, check_key, failure
from ..streams.link_estimate import LinkEstimate
from ..wrapped import WrappedStore
from .copy_choice import CopyChoice
from .copy_state import Copy
from .source_options import SourceOptions

_COMPARED = (keys.COMMITS, keys.ANCHORS, keys.SKIPS)
"""Records that a reader takes from a copy only after a check."""

_VIEWED = (keys.ANCHORS, keys.SKIPS, keys.MARKS)
"""Listings of these come from one copy, because they say what that copy has."""

_MOST_NOTES = 4096
"""Most keys of which the source is remembered."""

_MOST_LISTED, _LONGEST_LISTING = 1 << 18, 60.0
"""Most objects of a copy's listing, and the most seconds that it may take. A listing that continues is not used."""


class _TooSlow(StoreError):
    """A copy delivers too few bytes per second. Ends the transfer."""


class Sources(WrappedStore):
    """An origin, and copies of it. May be used from several threads.

    Parameters
    ----------
    origin
        The store that the trainer writes to.
    copies
        The stores of relays. The reader measures them and prefers the nearest.
    options
        How to use them.
    owned
        The stores that `close` closes.
    more
        Opens further copies. Called when something is read for the first time, and every ten minutes.
    on_event
        Called with an event when a copy is left alone for a while.
    clock
        Returns seconds on a clock that never goes back.
    """

    def __init__(
        self,
        origin: Store,
        copies: Sequence[Store],
        *,
        options: SourceOptions | None = None,
        owned: Iterable[Store] = (),
        more: Callable[[Store], Iterable[Store]] | None = None,
        on_event: OnEvent | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(origin)
        self._options = options or SourceOptions()
        self._owned = list(owned)
        self._on_event = on_event
        self._clock = clock
        self._choice = CopyChoice(origin, copies, self._options, more=more, on_event=on_event, clock=clock)
        self._absent: dict[str, float] = {}
        """When the origin was last asked in vain for a commit."""
        self._served: OrderedDict[str, Copy | None] = OrderedDict()
        """The copy that an object was last read from. None for the origin."""
        self._lock = threading.Lock()

    @property
    def origin(self) -> Store:
        """The store that the trainer writes to."""
        return self.inner

    @property
    def copy_urls(self) -> tuple[str, ...]:
        """The locations of the copies."""
        return tuple(copy.store.url for copy in self._choice.copies)

    def close(self) -> None:
        for store in (*self._owned, *self._choice.opened):
            store.close()

    # Reads that copies may answer

    def get_if_changed(self, key: str, *, limit: int, tag: str | None) -> tuple[bytes, str] | None:
        """Ask the origin; but what is announced is read where the announced files are."""
        usable = self._choice.usable() if key == keys.COMING else ()
        if not usable:
            return self.origin.get_if_changed(key, limit=limit, tag=tag)
        store = usable[0].store
        mark = f"{store.url} "  # a tag means nothing to other stores
        try:
            found = store.get_if_changed(key, limit=limit, tag=tag[len(mark) :] if tag is not None and tag.startswith(mark) else None)
        except ObjectMissing:
            raise
        except DeltawireError as error:
            self._choice.leave(usable[0], str(error))
            raise
        return None if found is None else (found[0], mark + found[1])

    def get(self, key: str, *, limit: int) -> bytes:
        check_key(key)
        if key.startswith(_COMPARED):
            return self._record(key, limit)
        if key == keys.HEAD or key.startswith(keys.MARKS):
            for copy in self._choice.usable():
                found = self._choice.ask(copy, partial(copy.store.get, key, limit=limit))
                if found is not None:
                    return found
        return self._choice.timed_at_origin(lambda: self.origin.get(key, limit=limit))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        if prefix in _VIEWED:
            for copy in self._choice.usable():
                found = self._choice.ask(copy, partial(self._listed, copy.store, prefix, after))
                if found is not None:
                    return iter(found)
        return self.origin.list(prefix, after=after)

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        data = keys.parse_data_key(key)
        reported = _ReportedOnce(progress)
        awaited: ObjectMissing | None = None
        for copy in () if data is None else self._choice.usable(for_data=True):
            if data is None or not copy.may_have(key, data.seq):
                continue
            try:
                if self._read_from(copy, key, data.seq, buffer, offset, reported):
                    return
            except ObjectMissing as missing:
                awaited = missing
        if awaited is not None:
            raise awaited
        self._note_reader(key, None)
        reported.begin()
        self.origin.read_into(key, buffer, offset=offset, progress=reported)

    def doubt(self, key: str) -> None:
        """Read this object from the origin from now on. A copy that served it wrongly is left alone for a while."""
        check_key(key)
        with self._lock:
            copy = self._served.get(key)
        if copy is None:
            self.origin.doubt(key)
            return
        for each in self._choice.copies:
            each.exclude(key)
        self._choice.leave(copy, f"its {key} does not have the content that its record says")

    def distrust(self, reason: str, *, may_come: bool) -> bool:
        now = self._clock()
        used = [copy for copy in self._choice.usable() if not (may_come and copy.is_waited_for(now, self._options.patience))]
        for copy in used:
            self._choice.leave(copy, reason)
        return bool(used) if may_come else bool(self._choice.copies)  # a copy may have been left since it served what is wrong

    def origin_alone(self) -> AbstractContextManager[None]:
        return self._choice.none_for_records()

    @property
    def streams(self) -> int:
        return self._choice.best().streams

    @property
    def link(self) -> LinkEstimate | None:
        return self._choice.best().link

    # Reading

    def _record(self, key: str, limit: int) -> bytes:
        """Return a record: a copy's, if signatures protect it, and otherwise the origin's, which is asked when a copy has the record."""
        seq = keys.parse_commit_key(key)
        usable = self._choice.usable()
        for copy in usable:
            found = self._choice.ask(copy, partial(copy.store.get, key, limit=limit))
            if found is None:
                continue
            if self._options.signed:
                copy.showed(seq, self._clock())
                return found
            try:
                own = self._choice.timed_at_origin(lambda: self.origin.get(key, limit=limit))
            except ObjectMissing:
                self._choice.leave(copy, f"it has {key}, which {self.origin.url} does not have")
                raise
            if own == found:
                copy.showed(seq, self._clock())
            else:
                self._choice.leave(copy, f"its {key} is not the one in {self.origin.url}")
            return own
        if seq is None or not usable:
            return self._choice.timed_at_origin(lambda: self.origin.get(key, limit=limit))
        with self._lock:
            asked = self._absent.get(key)
        if asked is not None and self._clock() < asked + self._options.origin_poll:
            raise ObjectMissing(failure("get", key, self.url, "there was no such object some seconds ago."))
        try:
            return self._choice.timed_at_origin(lambda: self.origin.get(key, limit=limit))
        except ObjectMissing:
            with self._lock:
                if len(self._absent) >= _MOST_NOTES:
                    self._absent.clear()
                self._absent[key] = self._clock()
            raise

    def _read_from(self, copy: Copy, key: str, seq: int, buffer: memoryview, offset: int, reported: _ReportedOnce) -> bool:
        """Read data from a copy. Return False if another source should be asked. Raises `ObjectMissing` while the data may still come."""
        began = self._clock()
        self._note_reader(key, copy)
        reported.begin()

        def arrived(count: int) -> None:
            reported(count)
            if copy.is_too_slow(count, self._clock(), self._options.patience, self._options.slowest):
                raise _TooSlow(f"it delivers less than {self._options.slowest / 1000:.0f} kB per second")

        try:
            with copy.reading(began):
                copy.store.read_into(key, buffer, offset=offset, progress=arrived)
        except ObjectMissing:
            now = self._clock()
            if copy.is_awaited(key, seq, now, self._options.patience):
                raise
            if copy.gave_up(seq):
                reason = f"it does not have {key}, and nothing else has arrived for some seconds"
                emit(self._on_event, "relay-late", relay=copy.store.url, key=key, reason=reason)
            return False
        except DataDamaged as error:
            copy.exclude(key)
            self._choice.leave(copy, str(error))
            return False
        except StoreError as error:
            self._choice.leave(copy, str(error))
            return False
        copy.delivered(key, len(buffer), began, self._clock())
        if not copy.is_read:
            copy.is_read = True
            emit(self._on_event, "relay-used", relay=copy.store.url)
        return True

    def _listed(self, store: Store, prefix: str, after: str | None) -> Sequence[ObjectInfo]:
        """Return a copy's listing. Raises `StoreError` if it does not end."""
        found: list[ObjectInfo] = []
        deadline = self._clock() + _LONGEST_LISTING
        for info in store.list(prefix, after=after):
            found.append(info)
            if len(found) > _MOST_LISTED or self._clock() > deadline:
                raise StoreError(failure("list", prefix, store.url, "the listing does not end."))
        return found

    def _note_reader(self, key: str, copy: Copy | None) -> None:
        with self._lock:
            self._served[key] = copy
            while len(self._served) > _MOST_NOTES:
                self._served.popitem(last=False)


class _ReportedOnce:
    """Reports the bytes of a transfer that may begin again at another source. Bytes that are read again are not reported again."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._most = self._now = 0

    def begin(self) -> None:
        """Note that the transfer begins from the start."""
        with self._lock:
            self._now = 0

    def __call__(self, count: int) -> None:
        with self._lock:
            self._now += count
            new = max(0, self._now - self._most)
            self._most += new
        if new and self._progress is not None:
            self._progress(new)
