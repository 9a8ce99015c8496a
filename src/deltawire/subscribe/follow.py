"""Keep a subscriber up to date: look, sync and wait, until it is stopped."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from ..chain.version import Version
from ..errors import ChainStale, DeltawireError

_LONGEST_PAUSE = 60.0
_SLICE = 0.2
"""Seconds between checks whether the subscriber was closed, while waiting."""
_SHORT_SLICE = 0.02
"""The same while files arrive ahead of their commit."""


class Followed(Protocol):
    """Can be kept up to date: a subscriber, or an object that is built on one."""

    @property
    def version(self) -> Version | None: ...

    def sync(self) -> Version: ...

    def _look(self) -> bool: ...

    def _use_ahead(self, until: float) -> bool: ...


def follow_chain(
    subscriber: Followed, *, poll: float, is_over: Callable[[], bool], stop: threading.Event | None = None
) -> Iterator[Version]:
    """Yield versions as they are reached. The subscriber reports retryable errors; here they only make the next look later."""
    if poll <= 0:
        raise ValueError(f"poll must be more than 0 seconds, not {poll}")
    return _versions(subscriber, poll, is_over, stop or threading.Event())


def _versions(subscriber: Followed, poll: float, is_over: Callable[[], bool], stop: threading.Event) -> Iterator[Version]:
    failures = 0
    is_due = True
    served = subscriber.version
    while not is_over():
        try:
            if is_due or subscriber._look():
                is_due = True  # until the sync succeeds
                subscriber.sync()
                is_due = False
            failures = 0
        except ChainStale:
            is_due = False  # the version was reached, and the error was reported
        except DeltawireError as error:
            if not error.retryable and not is_over():
                raise
            failures += 1
        except ValueError:
            if not is_over():  # otherwise another thread has just closed the subscriber
                raise
            return
        version = subscriber.version
        if version is not None and version != served:
            served = version
            yield version
        _wait(pause(poll, failures), stop, is_over, subscriber._use_ahead)


def pause(poll: float, failures: int, jitter: Callable[[], float] = random.random) -> float:
    """Return the seconds to wait: about `poll`, doubled with every failure in a row, up to a minute. It is random, so that a fleet does not
    ask in step.
    """
    longest = max(poll, _LONGEST_PAUSE)
    return min(poll * 2.0 ** min(failures, 30), longest) * (0.75 + 0.5 * jitter())


def _wait(seconds: float, stop: threading.Event, is_over: Callable[[], bool], meanwhile: Callable[[float], bool]) -> None:
    """Wait, and prepare meanwhile for the next version with files that arrive ahead of its commit."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not is_over():
        slice_ = _SHORT_SLICE if meanwhile(until) else _SLICE
        stop.wait(max(0.0, min(until - time.monotonic(), slice_)))
