"""Read a chain from several stores: the origin, and copies of it that relays keep (docs/protocol.md §11).

All writes go to the origin, and so does everything that is not part of the copies. A copy is never trusted further than the origin: data
have their hash in the key, and records are compared with the origin's unless the reader checks their signatures. A copy that fails, lags
or serves something wrong is left alone for a while, and the origin answers instead.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

from ..errors import BadUrl, DataDamaged, DeltawireError, LimitExceeded, ObjectMissing, StoreError
from ..events import OnEvent, emit
from ..format.records.canonical import MAX_RECORD_BYTES
from . import keys
from .base import Buffer, ObjectInfo, Progress, Store, StoreOptions, check_key, failure
from .copies import Copy
from .link_estimate import LinkEstimate
from .urls import open_store

Location: TypeAlias = str | Path | Store | Sequence[str | Path | Store]
"""Where a chain is: a URL, a path or an open store; or a list of them, the origin first, and then copies that relays keep."""

T = TypeVar("T")

_COMPARED = (keys.COMMITS, keys.ANCHORS, keys.SKIPS)
"""Records that a reader takes from a copy only after a check."""

_VIEWED = (keys.ANCHORS, keys.SKIPS, keys.MARKS)
"""Listings of these come from one copy, because they say what that copy has."""

_MOST_NOTES = 4096
"""Most keys of which the source is remembered."""

_LOOK_EVERY = 600.0
"""Seconds between two looks for more copies."""

_MOST_COPIES = 64
"""Most copies after these looks, whatever is published in the meantime."""

_MOST_LISTED, _LONGEST_LISTING = 1 << 18, 60.0
"""Most objects of a copy's listing, and the most seconds that it may take. A listing that goes on is not used."""

_SLOWEST = 64.0 * 1024
"""Bytes per second that a copy must deliver to be read on, unless the user allows less."""

_COPY_TIMEOUT, _COPY_RETRIES = 10.0, 1
"""A copy that does not answer is not waited for as long as the origin."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Say how a reader uses copies of a chain.

    Parameters
    ----------
    origin_poll
        Seconds between two requests to the origin for a commit that no copy has yet.
    patience
        Seconds to wait for data that a copy does not have yet. If the copy gets nothing new in this time, the origin is read. A copy that
        has got nothing new since this reader began is waited for a fifth of this time.
    signed
        Whether the reader checks signatures. If not, records from copies are compared with the origin's.
    slowest
        Bytes per second. A copy that delivers fewer for `patience` seconds is left alone, and the origin is read.
    """

    origin_poll: float = 5.0
    patience: float = 15.0
    signed: bool = False
    slowest: float = _SLOWEST


class _TooSlow(StoreError):
    """A copy delivers too few bytes per second. Ends the transfer."""


FindCopies: TypeAlias = Callable[[Store], Iterable[str]]
"""Returns the locations of copies that are published at an origin."""


def open_sources(
    location: Location,
    *,
    options: StoreOptions | None = None,
    sources: SourceOptions | None = None,
    find: FindCopies | None = None,
    on_event: OnEvent | None = None,
) -> Store:
    """Open the store at a location, or one that reads from several. Sends no request yet.

    Parameters
    ----------
    location
        A URL, a path or an open store, which is returned unchanged; or a list or tuple of them, the origin first.
    options
        How to reach remote stores. Copies get less time to answer.
    sources
        How to use copies.
    find
        Finds more copies, when the store is read for the first time and now and then afterwards.
    on_event
        Called with events of the stores.
    """
    if isinstance(location, Store):
        return location
    is_several = isinstance(location, Sequence) and not isinstance(location, str)
    urls = list(dict.fromkeys(cast("Sequence[str | Path | Store]", location))) if is_several else [cast("str | Path", location)]
    if not urls:
        raise BadUrl("an empty list names no store.")
    options = options or StoreOptions()
    if options.max_rate is not None:
        sources = sources or SourceOptions()
        sources = dataclasses.replace(sources, slowest=min(sources.slowest, options.max_rate / 2))
    hasty = dataclasses.replace(options, timeout=min(options.timeout, _COPY_TIMEOUT), retries=min(options.retries, _COPY_RETRIES))
    stores = [open_store(url, options=hasty if number else options, on_event=on_event) for number, url in enumerate(urls)]
    owned = [store for store, url in zip(stores, urls, strict=True) if store is not url]
    if len(stores) == 1 and owned and find is None:
        return stores[0]

    def more(origin: Store) -> Iterator[Store]:
        for url in () if find is None else find(origin):
            try:
                yield open_store(url, options=hasty, on_event=on_event)
            except DeltawireError as error:  # for example, no credentials for its provider
                emit(on_event, "relay-avoided", relay=url, reason=str(error), seconds=_LOOK_EVERY)

    return Sources(stores[0], stores[1:], options=sources, owned=owned, more=None if find is None else more, on_event=on_event)


class Sources(Store):
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
        self.url = origin.url
        self.origin = origin
        self._options = options or SourceOptions()
        self._owned = list(owned)
        self._more = more
        self._look_again_at = float("-inf")
        self._on_event = on_event
        self._clock = clock
        self._copies = [Copy(store) for store in copies]
        self._run: bytes | None = None
        self._origin_latency: float | None = None
        self._absent: dict[str, float] = {}
        """When the origin was last asked in vain for a commit."""
        self._served: OrderedDict[str, Copy | None] = OrderedDict()
        """The copy that an object was last read from. None for the origin."""
        self._alone = 0
        """How many readers want to read records from the origin only at this moment."""
        self._reported_empty: set[str] = set()
        """URLs of copies of which an event said that they hold no chain."""
        self._lock = threading.Lock()

    @property
    def copy_urls(self) -> tuple[str, ...]:
        """The locations of the copies."""
        return tuple(copy.store.url for copy in self._copies)

    # Writes, and reads from the origin only

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.origin.put_if_absent(key, data)

    def put(
        self,
        key: str,
        data: Buffer | Iterable[Buffer],
        *,
        size: int | None = None,
        progress: Progress | None = None,
        durable: bool = True,
    ) -> None:
        self.origin.put(key, data, size=size, progress=progress, durable=durable)

    def delete(self, keys: Iterable[str]) -> None:
        self.origin.delete(keys)

    def head(self, key: str) -> ObjectInfo:
        return self.origin.head(key)

    def get_if_changed(self, key: str, *, limit: int, tag: str | None) -> tuple[bytes, str] | None:
        """Ask the origin; but what is announced is read where the announced files are."""
        usable = self._usable() if key == keys.COMING else ()
        if not usable:
            return self.origin.get_if_changed(key, limit=limit, tag=tag)
        store = usable[0].store
        mark = f"{store.url} "  # a tag means nothing to other stores
        try:
            found = store.get_if_changed(key, limit=limit, tag=tag[len(mark) :] if tag is not None and tag.startswith(mark) else None)
        except ObjectMissing:
            raise
        except DeltawireError as error:
            self._leave(usable[0], str(error))
            raise
        return None if found is None else (found[0], mark + found[1])

    def wait_for_change(self, key: str, *, limit: int, tag: str | None, timeout: float) -> tuple[bytes, str] | None:
        return self.origin.wait_for_change(key, limit=limit, tag=tag, timeout=timeout)

    def close(self) -> None:
        for store in self._owned:
            store.close()

    # Reads that copies may answer

    def get(self, key: str, *, limit: int) -> bytes:
        check_key(key)
        if key.startswith(_COMPARED):
            return self._record(key, limit)
        if key == keys.HEAD or key.startswith(keys.MARKS):
            for copy in self._usable():
                found = self._ask(copy, partial(copy.store.get, key, limit=limit))
                if found is not None:
                    return found
        return self._timed_at_origin(lambda: self.origin.get(key, limit=limit))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        if prefix in _VIEWED:
            for copy in self._usable():
                found = self._ask(copy, partial(self._listed, copy.store, prefix, after))
                if found is not None:
                    return iter(found)
        return self.origin.list(prefix, after=after)

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        data = keys.parse_data_key(key)
        reported = _ReportedOnce(progress)
        awaited: ObjectMissing | None = None
        for copy in () if data is None else self._usable(for_data=True):
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
        for each in self._copies:
            each.exclude(key)
        self._leave(copy, f"{key} there does not have the content that its record says")

    def distrust(self, reason: str, *, may_come: bool) -> bool:
        now = self._clock()
        used = [copy for copy in self._usable() if not (may_come and copy.is_waited_for(now, self._options.patience))]
        for copy in used:
            self._leave(copy, reason)
        return bool(used) if may_come else bool(self._copies)  # a copy may have been left since it served what is wrong

    @contextmanager
    def origin_alone(self) -> Iterator[None]:
        with self._lock:
            self._alone += 1
        try:
            yield
        finally:
            with self._lock:
                self._alone -= 1

    @property
    def streams(self) -> int:
        return self._best().streams

    @property
    def link(self) -> LinkEstimate | None:
        return self._best().link

    @property
    def can_wait(self) -> bool:
        return self.origin.can_wait

    # Choosing a copy

    def _usable(self, *, for_data: bool = False) -> Sequence[Copy]:
        """Return the copies of this chain that answer and are nearer than the origin, best first."""
        if self._alone and not for_data:
            return ()
        now = self._clock()
        self._look_for_more(now)
        found = [copy for copy in self._copies if copy.is_due(now) and self._is_same_run(copy)]
        nearer = [copy for copy in found if copy.is_nearer_than(self._origin_latency)]
        nearest = min((copy.latency for copy in nearer if copy.latency is not None), default=None)
        return sorted(nearer, key=lambda copy: copy.rank(now, nearest) if for_data else (copy.is_far_from(nearest), 0.0))

    def _look_for_more(self, now: float) -> None:
        with self._lock:
            if self._more is None or now < self._look_again_at:
                return
            self._look_again_at = now + _LOOK_EVERY
        known = {self.url, *self.copy_urls}
        try:
            for store in self._more(self.origin):
                if store.url not in known and len(self._copies) < _MOST_COPIES:
                    known.add(store.url)
                    self._owned.append(store)
                    self._copies.append(Copy(store))
        except DeltawireError:  # copies are only a convenience
            self._look_again_at = now + self._options.origin_poll

    def _best(self) -> Store:
        now = self._clock()
        ready = [copy for copy in self._copies if copy.is_due(now) and copy.has_run and copy.is_nearer_than(self._origin_latency)]
        nearest = min((copy.latency for copy in ready if copy.latency is not None), default=None)
        return min(ready, key=lambda copy: copy.rank(now, nearest)).store if ready else self.origin

    def _is_same_run(self, copy: Copy) -> bool:
        """Return whether a copy is of the origin's chain. This is asked once, and again after the copy was left alone."""
        if copy.has_run:
            return True
        if self._run is None:
            try:
                self._run = self._timed_at_origin(lambda: self.origin.get(keys.RUN, limit=MAX_RECORD_BYTES))
            except (ObjectMissing, LimitExceeded):
                return False
        found = self._ask(copy, lambda: copy.store.get(keys.RUN, limit=MAX_RECORD_BYTES))
        if found is None:
            if copy.is_due(self._clock()):  # there is no chain yet, so look again later
                copy.wait_until(self._clock() + self._options.origin_poll)
                self._report_empty(copy)
            return False
        if found != self._run:
            self._leave(copy, "another run is there")
            return False
        copy.has_run = True
        return True

    def _ask(self, copy: Copy, request: Callable[[], T]) -> T | None:
        """Return a copy's answer to a small request. None if the object is missing there, or if the copy fails. It is then left alone."""
        began = self._clock()
        try:
            found = request()
        except ObjectMissing:
            copy.answered(self._clock() - began)
            return None
        except DeltawireError as error:
            self._leave(copy, str(error))
            return None
        copy.answered(self._clock() - began)
        return found

    def _timed_at_origin(self, request: Callable[[], T]) -> T:
        began = self._clock()
        found = request()
        seconds = self._clock() - began
        self._origin_latency = seconds if self._origin_latency is None else min(self._origin_latency, seconds)
        return found

    def _leave(self, copy: Copy, reason: str) -> None:
        seconds = copy.leave(self._clock())
        emit(self._on_event, "relay-avoided", relay=copy.store.url, reason=reason, seconds=seconds)

    def _report_empty(self, copy: Copy) -> None:
        """Report once that there is no chain in a copy: no relay has begun yet, or its URL is wrong."""
        with self._lock:
            if copy.store.url in self._reported_empty:
                return
            self._reported_empty.add(copy.store.url)
        reason = "no chain is there yet. Check the URL, and that a relay runs"
        emit(self._on_event, "relay-avoided", relay=copy.store.url, reason=reason, seconds=self._options.origin_poll)

    # Reading

    def _record(self, key: str, limit: int) -> bytes:
        """Return a record: a copy's, if signatures protect it, and otherwise the origin's, which is asked when a copy has the record."""
        seq = keys.parse_commit_key(key)
        usable = self._usable()
        for copy in usable:
            found = self._ask(copy, partial(copy.store.get, key, limit=limit))
            if found is None:
                continue
            if self._options.signed:
                copy.showed(seq, self._clock())
                return found
            try:
                own = self._timed_at_origin(lambda: self.origin.get(key, limit=limit))
            except ObjectMissing:
                self._leave(copy, f"{key} is there, but not in {self.origin.url}")
                raise
            if own == found:
                copy.showed(seq, self._clock())
            else:
                self._leave(copy, f"{key} there is not the one in {self.origin.url}")
            return own
        if seq is None or not usable:
            return self._timed_at_origin(lambda: self.origin.get(key, limit=limit))
        with self._lock:
            asked = self._absent.get(key)
        if asked is not None and self._clock() < asked + self._options.origin_poll:
            raise ObjectMissing(failure("get", key, self.url, "there was no such object some seconds ago."))
        try:
            return self._timed_at_origin(lambda: self.origin.get(key, limit=limit))
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
                reason = f"{key} is not there, and nothing else has arrived for some seconds"
                emit(self._on_event, "relay-late", relay=copy.store.url, key=key, reason=reason)
            return False
        except DataDamaged as error:
            copy.exclude(key)
            self._leave(copy, str(error))
            return False
        except StoreError as error:
            self._leave(copy, str(error))
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
