"""Requests of trainer and members, as values, so that the same code runs over a real store and in a simulation with virtual time.

Steps are generators that yield requests and are sent the answers. If a request fails, its error is raised at the `yield`. Steps do not
read a clock, draw random numbers that were not given to them, or use threads. Requests to the store are in `deltawire.store.requests`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ...errors import DeltawireError
from ...format.records.fleet_files import Row
from ...format.records.member_records import Lease
from ...format.records.trainer_records import Round
from ...store.base import Store
from ...store.requests import Create, Delete, Get, Head, List, Put, Sleep, ask_store, drive
from .signal import Signal

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FindVersion:
    """Read the chain again, and find a version. The answer is a `KnownVersion`, or None if the chain has no such version.

    Only trainers ask for it.
    """

    seq: int


@dataclass(frozen=True, slots=True)
class Sync:
    """Try to get the version of `step` or a later one. The answer is the version that would make completions now, or None for none.

    The version may be older than `step`. How long the attempt takes is up to the code that performs it. Only members ask for it.
    """

    step: int


@dataclass(frozen=True, slots=True)
class Generate:
    """Make completions for a lease. The answer is `Rollouts`, or None if the member is told to leave.

    Fails with `EngineError` if it is impossible now. Only members ask for it.
    """

    round: Round
    lease: Lease
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until other steps of this process give a signal, for at most `seconds`. The answer is None.

    `seen` is the count of the signal when the steps last looked. If it has changed since, the wait ends at once.
    """

    signal: Signal
    seen: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Watch:
    """Read an object that may have changed. The answer is its bytes and its tag, or None if it still has the tag `tag`.

    Fails as `Get` does. If the object has not changed, the answer comes after `seconds`. A store that can wait for a change answers as soon
    as there is one; other stores are asked once, after `seconds`.
    """

    key: str
    limit: int
    tag: str | None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Together:
    """Make several requests at once. The answer is a list with the answer of each, or the `DeltawireError` that it failed with."""

    requests: tuple[Get | Head | List | Put, ...]


Request: TypeAlias = Get | Head | Create | Put | List | Delete | Sleep | Wait | Watch | FindVersion | Sync | Generate | Together
Steps: TypeAlias = Generator[Request, Any, T]
Perform: TypeAlias = Callable[[FindVersion | Sync | Generate], Any]
"""Answers the requests that a store cannot answer."""

MOST_TOGETHER = 64
"""Largest number of requests of a `Together` that are in flight at the same time."""


def run_steps(
    steps: Steps[T],
    store: Store,
    *,
    sleep: Callable[[float], object] = time.sleep,
    perform: Perform | None = None,
    pool: ThreadPoolExecutor | None = None,
) -> T:
    """Run steps over a store until they return, and return their result.

    An error that is not an `Exception` (a simulated death, Ctrl-C) ends the steps at once, as a crash would. The steps do not see it.

    Parameters
    ----------
    steps
        The steps.
    store
        Answers the requests for objects.
    sleep
        Waits a number of seconds.
    perform
        Answers `FindVersion`, `Sync` and `Generate`.
    pool
        Runs the requests of a `Together`. Without it they run one after the other.
    """

    def answer(request: Request) -> Any:
        if isinstance(request, Sleep):
            return sleep(request.seconds)
        if isinstance(request, (FindVersion, Sync, Generate)):
            if perform is None:
                raise TypeError(f"{type(request).__name__} was asked for, but run_steps was not given `perform`")
            return perform(request)
        if isinstance(request, Wait):
            return request.signal.wait(request.seen, request.seconds)
        if isinstance(request, Watch):
            return _watch(store, request, sleep)
        if isinstance(request, Together):
            apply = map if pool is None else pool.map
            return list(apply(lambda each: _answer_or_error(store, each), request.requests))
        return ask_store(store, request)

    return drive(steps, answer)


def _watch(store: Store, request: Watch, sleep: Callable[[float], object]) -> tuple[bytes, str] | None:
    if request.seconds > 0 and store.can_wait:
        return store.wait_for_change(request.key, limit=request.limit, tag=request.tag, timeout=request.seconds)
    if request.seconds > 0:
        sleep(request.seconds)
    return store.get_if_changed(request.key, limit=request.limit, tag=request.tag)


def _answer_or_error(store: Store, request: Get | Head | List | Put) -> Any:
    try:
        return ask_store(store, request)
    except DeltawireError as error:
        return error
