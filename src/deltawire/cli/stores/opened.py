"""Open the store of a command, and report on stderr when the store does not answer."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..output.event_notices import notice_of, print_if_verbose
from ..output.terminal import print_notice

if TYPE_CHECKING:
    from ...chain.reader_options import ReaderOptions
    from ...events import Event
    from ...store import Store, StoreOptions

_SAME_FAILURE = 5.0
"""Requests that are repeated for the nth time within this many seconds count as one failure."""


@contextmanager
def opened(
    url: str,
    *,
    copies: Sequence[str] | None = None,
    reading: ReaderOptions | None = None,
    verbose: bool = False,
    options: StoreOptions | None = None,
) -> Iterator[Store]:
    """Open the store at a URL, and close it at the end. Report repeated requests on stderr.

    Parameters
    ----------
    url
        The location of the chain.
    copies
        Copies of the chain that relays keep.
    reading
        How the command reads the chain. `options` is not used then.
    verbose
        Report every request and every event.
    options
        How to reach the store.
    """
    from ...chain.reader_options import ReaderOptions

    reading = reading or ReaderOptions(store=options)
    with reading.open_store([url, *(copies or ())], on_event=RetryNotices(verbose=verbose)) as store:
        if verbose:
            from .traced_store import TracedStore

            store = TracedStore(store)
        yield store


class RetryNotices:
    """Listens to the events of a store, and reports on stderr that a request is sent again, or that a relay's copy is not used.

    Requests that fail at the same time give one line per attempt, not one line per request.

    Parameters
    ----------
    verbose
        Also print every event with its fields.
    clock
        Returns the current time in seconds.
    """

    def __init__(self, *, verbose: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._verbose = verbose
        self._clock = clock
        self._reported: dict[int, float] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        print_if_verbose(event, self._verbose)
        notice = notice_of(event)
        if notice is not None:
            print_notice(notice)
        if event.name != "retrying":
            return
        attempt, now = int(event.fields["attempt"] or 0), self._clock()
        with self._lock:
            is_new = now - self._reported.get(attempt, -math.inf) >= _SAME_FAILURE
            if is_new:
                self._reported[attempt] = now
        if is_new:
            print_notice(f"the store did not answer; trying again ({attempt} of {event.fields['attempts']})")
