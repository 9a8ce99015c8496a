"""Keep a subscriber up to date: look, sync, wait, for ever."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from ..chain.version import Version
from ..errors import ChainStale, DeltawireError

_LONGEST_PAUSE = 60.0
_SLICE = 0.2
"""Seconds after which a wait looks whether the subscriber was closed."""


class Followed(Protocol):
    """What can be kept up to date: a subscriber, or what is built on one."""

    @property
    def version(self) -> Version | None: ...

    def sync(self) -> Version: ...

    def _look(self) -> bool: ...


def follow_chain(
    subscriber: Followed, *, poll: float, is_over: Callable[[], bool], stop: threading.Event | None = None
) -> Iterator[Version]:
    """Versions as they are reached. Errors that may heal are the subscriber's to report; here they only slow the pace."""
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
                is_due = True  # until it has succeeded
                subscriber.sync()
                is_due = False
            failures = 0
        except ChainStale:
            is_due = False  # reached, and reported; there is nothing to do but wait
        except DeltawireError as error:
            if not error.retryable and not is_over():
                raise
            failures += 1
        except ValueError:
            if not is_over():  # closed by another thread just now
                raise
            return
        version = subscriber.version
        if version is not None and version != served:
            served = version
            yield version
        _wait(pause(poll, failures), stop, is_over)


def pause(poll: float, failures: int, jitter: Callable[[], float] = random.random) -> float:
    """How long to wait: about `poll`, doubled with every failure in a row up to a minute; jittered, lest a fleet ask in step."""
    longest = max(poll, _LONGEST_PAUSE)
    return min(poll * 2.0 ** min(failures, 30), longest) * (0.75 + 0.5 * jitter())


def _wait(seconds: float, stop: threading.Event, is_over: Callable[[], bool]) -> None:
    while seconds > 0 and not is_over():
        stop.wait(min(seconds, _SLICE))
        seconds -= _SLICE
