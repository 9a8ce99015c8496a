"""Limit how many transfers run at the same time, and let the limit follow the measured link.

One stream is slow on a link with a long delay, and too many streams share a narrow link without any gain. So the number of streams starts
small, doubles in each round trip while goodput grows (`stream_ramp`), then follows the goodput in small steps, and shrinks when goodput
falls or transfers fail.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .link_estimate import LinkEstimate
from .stream_ramp import Ramp, first_width

FIRST_STREAMS = 4
"""The width at the beginning, if nothing is known about a link."""

_SHORTEST_ROUND = 0.05
_SHORTEST_WINDOW = 0.25
_LATENCIES_PER_WINDOW = 2
_FEWEST_REPORTS, _REPORTS_PER_STREAM = 16, 4
"""A window holds at least so many reports of bytes, unless they take too long. Fewer would measure chance."""
_LONGEST_WINDOW = 2.0
_SHORTEST_SETTLING = 0.1
"""After a change of the width nothing is measured for this time, and for two latencies: new streams have not delivered anything yet."""
_FULL = 0.8
"""The share of a window in which no further transfer could start. Otherwise the number of streams did not limit the goodput."""

_MORE, _LESS = 1.08, 0.9
_GROW, _SHRINK, _TRY = 1.5, 0.7, 1.25
_TRY_EVERY, _TRY_AFTER_FAILURE = 20, 5
_ENOUGH_BYTES = 1 << 20
_NEWEST = 0.3
_REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class _Trial:
    """A change of the width that is taken back unless goodput reaches `needed`."""

    width_before: int
    goodput_before: float
    needed: float


class StreamControl:
    """Decides how many transfers should run at the same time. It has no threads and no locks, and its time comes from `clock`.

    Time counts only while a transfer runs. It is divided into rounds at first, and into longer windows later. The width changes at most
    once in each.

    Parameters
    ----------
    first
        The width at the beginning.
    most
        The largest width.
    clock
        Returns the current time in seconds.
    """

    def __init__(self, *, first: int = FIRST_STREAMS, most: int = 64, clock: Callable[[], float] = time.monotonic) -> None:
        self.width = min(first, most)
        self.running = 0
        self._most = most
        self._clock = clock
        self._last = self._ended = clock()
        self._latencies: deque[float] = deque(maxlen=_REMEMBERED)
        self._delays: deque[float] = deque(maxlen=_REMEMBERED)
        self._latest_uploads: deque[float] = deque(maxlen=_REMEMBERED)
        self._failures = 0
        self._is_used = False
        self._ramp: Ramp | None = Ramp(most)
        self._is_narrowing = False
        self._goodput: float | None = None
        self._measured_bytes, self._measured_seconds = 0, 0.0
        self._recent: deque[float] = deque(maxlen=2)
        self._trial: _Trial | None = None
        self._is_recovering = False
        self._until_try = _TRY_EVERY
        self._settling = 0.0
        self._has_shrunk = False
        self._begin_window()

    def start(self) -> None:
        """Note that a transfer begins."""
        self._advance()
        if not self._is_used:
            self.width = first_width(self._delay(), self.width, self._most)
            self._is_used = True
        elif self.running == 0 and self._ramp is None and self._last - self._ended > self._settling_seconds():
            # A pause is over, and nothing has arrived yet.
            self._settling = self._settling_seconds()
            self._begin_window()
        self.running += 1

    def end(self, seconds: float | None = None) -> None:
        """Note that a transfer ends, in whatever way.

        Parameters
        ----------
        seconds
            The seconds of a whole transfer that has no first byte to wait for, such as an upload.
        """
        self._advance()
        self.running -= 1
        self._ended = self._last
        if seconds is not None:
            self._latest_uploads.append(seconds)

    def answered(self, latency: float) -> None:
        """Note the seconds from a request to the first byte of its answer."""
        self._latencies.append(latency)

    def heard(self, delay: float) -> None:
        """Note the seconds from a small request to its answer."""
        self._delays.append(delay)

    def moved(self, nbytes: int) -> None:
        """Note that useful bytes have been transferred."""
        self._advance()
        if self._settling <= 0:
            self._bytes += nbytes
            self._reports += 1
        self._measured_bytes += nbytes
        if self._measured_bytes >= _ENOUGH_BYTES and self._measured_seconds > 0:
            found = self._measured_bytes / self._measured_seconds
            self._goodput = found if self._goodput is None else (1 - _NEWEST) * self._goodput + _NEWEST * found
            self._measured_bytes, self._measured_seconds = 0, 0.0
        if self._ramp is not None:
            self._end_round(self._ramp)
        elif self._is_window_over():
            if self._full >= _FULL * self._busy:
                self._decide(self._bytes / self._busy)
            self._begin_window()

    def failed(self) -> None:
        """Note that a transfer was cut, timed out, or was refused by an overloaded service."""
        self._advance()
        self._failures += 1
        if self._has_shrunk:  # one fault of the link often ends many transfers
            return
        self._ramp, self._is_narrowing = None, False
        self._set_width(int(self.width * _SHRINK))
        self._recent.clear()
        self._trial = None
        self._is_recovering = True
        self._until_try = _TRY_AFTER_FAILURE
        self._begin_window()
        self._has_shrunk = True

    def estimate(self) -> LinkEstimate:
        """Return what is known about the link."""
        return LinkEstimate(self._goodput, self._latency(), self.width, self._failures)

    @property
    def is_growing(self) -> bool:
        """Whether the width may still double, so that callers should have more transfers ready than run."""
        return self._ramp is not None

    def _latency(self) -> float | None:
        return statistics.median(self._latencies) if self._latencies else None

    def _delay(self) -> float | None:
        """Return the shortest delay of a small request: others waited for a connection, or for other transfers."""
        return min(self._delays, default=None)

    def _pace(self) -> float:
        """Return the seconds after which a change of the width begins to show."""
        if self._latencies:
            return statistics.median(self._latencies)
        return statistics.median(self._latest_uploads) if self._latest_uploads else self._delay() or 0.0

    def _advance(self) -> None:
        now = self._clock()
        passed, self._last = max(0.0, now - self._last), now
        if self.running:
            self._measured_seconds += passed
        if self.running and self._settling > 0:
            self._settling -= passed
        elif self.running:
            self._busy += passed
            if self.running >= self.width:
                self._full += passed

    def _begin_window(self) -> None:
        self._busy = self._full = 0.0
        self._bytes = self._reports = 0
        self._has_shrunk = False

    def _end_round(self, ramp: Ramp) -> None:
        """If a round is over in which the width limited the goodput, set the width for the next one."""
        shortest = max(_SHORTEST_ROUND, self._pace())
        if self._busy < shortest or (self._reports < self.running and self._busy < max(_LONGEST_WINDOW, 4 * shortest)):
            return
        if self._full >= _FULL * self._busy:
            goodput = self._bytes / self._busy
            self.width = ramp.next_width(self.width, goodput)
            if ramp.is_over or self.width == self._most:
                self._ramp, self._is_narrowing = None, not ramp.has_helped
                self._recent.append(goodput)
                self._settling = self._settling_seconds()
        self._begin_window()

    def _is_window_over(self) -> bool:
        shortest = max(_SHORTEST_WINDOW, _LATENCIES_PER_WINDOW * self._pace())
        if self._busy < shortest:
            return False
        return self._reports >= max(_FEWEST_REPORTS, _REPORTS_PER_STREAM * self.width) or self._busy >= max(_LONGEST_WINDOW, 4 * shortest)

    def _decide(self, goodput: float) -> None:
        trial, self._trial = self._trial, None
        if trial is not None and goodput < trial.needed:
            self._set_width(trial.width_before)
            self._recent.clear()
            self._recent.append(trial.goodput_before)
            self._is_narrowing = False
            return
        if self._is_narrowing and self.width > FIRST_STREAMS:  # more streams than at first brought nothing, so fewer may suffice, too
            self._try(max(FIRST_STREAMS, self.width // 2), goodput, 0.95 * goodput)
            return
        best = max(self._recent, default=0.0)
        self._recent.append(goodput)
        if goodput >= _MORE * best and not self._is_recovering:
            self._try(max(self.width + 1, int(self.width * _GROW)), goodput, 1.02 * goodput)
        elif goodput <= _LESS * best:
            self._recent.clear()
            self._recent.append(goodput)
            self._try(max(min(2, self.width), int(self.width * _SHRINK)), goodput, 0.95 * goodput)  # with two, one moves while one begins
        else:
            self._until_try -= 1
            if self._until_try <= 0:
                self._try(max(self.width + 1, int(self.width * _TRY)), goodput, 1.02 * goodput)
        self._is_recovering = False

    def _try(self, width: int, goodput: float, needed: float) -> None:
        self._until_try = _TRY_EVERY
        before = self.width
        self._set_width(width)
        if self.width != before:
            self._trial = _Trial(before, goodput, needed)

    def _set_width(self, width: int) -> None:
        self.width = min(max(1, width), self._most)
        self._settling = self._settling_seconds()

    def _settling_seconds(self) -> float:
        return max(_SHORTEST_SETTLING, _LATENCIES_PER_WINDOW * self._pace())


class Transfer:
    """One transfer under a limit. It reports what happens to it.

    Parameters
    ----------
    limit
        The limit that let the transfer begin. None if the transfer is not measured.
    """

    def __init__(self, limit: StreamLimit | None) -> None:
        self._limit = limit
        self._began = 0.0 if limit is None else limit.now()
        self.is_answered = False

    @property
    def seconds(self) -> float:
        """The seconds since the transfer began."""
        return 0.0 if self._limit is None else self._limit.now() - self._began

    def first_byte(self) -> None:
        """Report that the answer has begun."""
        self.is_answered = True
        if self._limit is not None:
            seconds = self.seconds
            self._limit.tell(lambda control: control.answered(seconds))

    def moved(self, nbytes: int) -> None:
        """Report that useful bytes have been transferred."""
        if self._limit is not None:
            self._limit.tell(lambda control: control.moved(nbytes))

    def failed(self) -> None:
        """Report that the transfer was cut, timed out, or was refused by an overloaded service."""
        if self._limit is not None:
            self._limit.tell(lambda control: control.failed())


class StreamLimit:
    """Lets transfers begin as long as fewer run than the measured link can use. May be used from several threads.

    Parameters
    ----------
    first
        How many transfers may run at the beginning.
    most
        The largest number that may ever run.
    clock
        Returns the current time in seconds.
    """

    def __init__(self, *, first: int = FIRST_STREAMS, most: int = 64, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self._most = most
        self._control = StreamControl(first=first, most=most, clock=clock)
        self._waiting = 0
        self._changed = threading.Condition()

    @property
    def width(self) -> int:
        """The number of transfers that may run at present."""
        return self._control.width

    @property
    def is_measured(self) -> bool:
        """Whether the width follows the goodput of transfers."""
        with self._changed:
            return self._control.estimate().goodput is not None

    @property
    def room(self) -> int:
        """The number of transfers that should be ready: more than may run at present, while that number grows."""
        with self._changed:
            return self._most if self._control.is_growing else self._control.width

    @property
    def free(self) -> int:
        """The number of further transfers that could begin at once."""
        with self._changed:
            return max(0, self._control.width - self._control.running - self._waiting)

    @contextmanager
    def transfer(self) -> Iterator[Transfer]:
        """Wait until a transfer may begin. It ends with the context."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._control.running < self._control.width)
            finally:
                self._waiting -= 1
            self._control.start()
        transfer = Transfer(self)
        try:
            yield transfer
        finally:
            with self._changed:
                self._control.end(None if transfer.is_answered else transfer.seconds)
                self._changed.notify()

    def heard(self, delay: float) -> None:
        """Note the seconds from a small request, which did not wait for the limit, to its answer."""
        with self._changed:
            self._control.heard(delay)

    def tell(self, report: Callable[[StreamControl], None]) -> None:
        """Pass a report on to the control, and let waiting transfers begin if the width has grown."""
        with self._changed:
            width = self._control.width
            report(self._control)
            if self._control.width > width:
                self._changed.notify_all()

    def estimate(self) -> LinkEstimate:
        """Return what is known about the link."""
        with self._changed:
            return self._control.estimate()
