"""The choice of the copies that a reader asks: those of the same run that answer, and are nearer than the origin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ...errors import DeltawireError, LimitExceeded, ObjectMissing
from ...events import OnEvent, emit
from ...format.records.canonical import MAX_RECORD_BYTES
from .. import keys
from ..base import Store
from .copy_state import Copy
from .source_options import SourceOptions

T = TypeVar("T")

LOOK_EVERY = 600.0
"""Seconds between two looks for more copies."""

_MOST_COPIES = 64
"""Most copies after these looks, whatever is published in the meantime."""


class CopyChoice:
    """Chooses among copies of an origin. It measures them, leaves those alone that fail, and looks for more. Used from several threads.

    Parameters
    ----------
    origin
        The store that the trainer writes to.
    copies
        The stores of relays.
    options
        How to use copies.
    more
        Opens further copies. Called when copies are needed for the first time, and every ten minutes.
    on_event
        Called with an event when a copy is left alone for a while.
    clock
        Returns seconds on a clock that never goes back.
    """

    def __init__(
        self,
        origin: Store,
        copies: Iterable[Store],
        options: SourceOptions,
        *,
        more: Callable[[Store], Iterable[Store]] | None,
        on_event: OnEvent | None,
        clock: Callable[[], float],
    ) -> None:
        self.copies = [Copy(store) for store in copies]
        self.opened: list[Store] = []
        """The stores of copies that were found later."""
        self._origin = origin
        self._options = options
        self._more = more
        self._on_event = on_event
        self._clock = clock
        self._look_again_at = float("-inf")
        self._run: bytes | None = None
        self._latency: float | None = None
        """The shortest time that the origin took to answer a small request."""
        self._alone = 0
        """How many readers want to read records from the origin only at this moment."""
        self._reported_empty: set[str] = set()
        """URLs of copies of which an event said that they hold no chain."""
        self._lock = threading.Lock()

    @contextmanager
    def none_for_records(self) -> Iterator[None]:
        """Return a context in which copies are only usable for data."""
        with self._lock:
            self._alone += 1
        try:
            yield
        finally:
            with self._lock:
                self._alone -= 1

    def usable(self, *, for_data: bool = False) -> Sequence[Copy]:
        """Return the copies of this chain that answer and are nearer than the origin, best first."""
        if self._alone and not for_data:
            return ()
        now = self._clock()
        self._look_for_more(now)
        found = [copy for copy in self.copies if copy.is_due(now) and self._is_same_run(copy)]
        nearer = [copy for copy in found if copy.is_nearer_than(self._latency)]
        nearest = min((copy.latency for copy in nearer if copy.latency is not None), default=None)
        return sorted(nearer, key=lambda copy: copy.rank(now, nearest) if for_data else (copy.is_far_from(nearest), 0.0))

    def _look_for_more(self, now: float) -> None:
        with self._lock:
            if self._more is None or now < self._look_again_at:
                return
            self._look_again_at = now + LOOK_EVERY
        known = {self._origin.url, *(copy.store.url for copy in self.copies)}
        try:
            for store in self._more(self._origin):
                if store.url not in known and len(self.copies) < _MOST_COPIES:
                    known.add(store.url)
                    self.opened.append(store)
                    self.copies.append(Copy(store))
        except DeltawireError:  # copies are only a convenience
            self._look_again_at = now + self._options.origin_poll

    def best(self) -> Store:
        now = self._clock()
        ready = [copy for copy in self.copies if copy.is_due(now) and copy.has_run and copy.is_nearer_than(self._latency)]
        nearest = min((copy.latency for copy in ready if copy.latency is not None), default=None)
        return min(ready, key=lambda copy: copy.rank(now, nearest)).store if ready else self._origin

    def _is_same_run(self, copy: Copy) -> bool:
        """Return whether a copy is of the origin's chain. This is asked once, and again after the copy was left alone."""
        if copy.has_run:
            return True
        if self._run is None:
            try:
                self._run = self.timed_at_origin(lambda: self._origin.get(keys.RUN, limit=MAX_RECORD_BYTES))
            except (ObjectMissing, LimitExceeded):
                return False
        found = self.ask(copy, lambda: copy.store.get(keys.RUN, limit=MAX_RECORD_BYTES))
        if found is None:
            if copy.is_due(self._clock()):  # there is no chain yet, so look again later
                copy.wait_until(self._clock() + self._options.origin_poll)
                self._report_empty(copy)
            return False
        if found != self._run:
            self.leave(copy, "it holds another run")
            return False
        copy.has_run = True
        return True

    def ask(self, copy: Copy, request: Callable[[], T]) -> T | None:
        """Return a copy's answer to a small request. None if the object is missing there, or if the copy fails. It is then left alone."""
        began = self._clock()
        try:
            found = request()
        except ObjectMissing:
            copy.answered(self._clock() - began)
            return None
        except DeltawireError as error:
            self.leave(copy, str(error))
            return None
        copy.answered(self._clock() - began)
        return found

    def timed_at_origin(self, request: Callable[[], T]) -> T:
        began = self._clock()
        found = request()
        seconds = self._clock() - began
        self._latency = seconds if self._latency is None else min(self._latency, seconds)
        return found

    def leave(self, copy: Copy, reason: str) -> None:
        seconds = copy.leave(self._clock())
        emit(self._on_event, "relay-avoided", relay=copy.store.url, reason=reason, seconds=seconds)

    def _report_empty(self, copy: Copy) -> None:
        """Report once that there is no chain in a copy: no relay has begun yet, or its URL is wrong."""
        with self._lock:
            if copy.store.url in self._reported_empty:
                return
            self._reported_empty.add(copy.store.url)
        reason = "it holds no chain yet. Check the URL, and that a relay runs"
        emit(self._on_event, "relay-avoided", relay=copy.store.url, reason=reason, seconds=self._options.origin_poll)
