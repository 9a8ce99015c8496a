"""What trainer and members ask of the world, as values: the same logic runs over a real store and in a simulation with a clock of its own.

Logic is written as generators that yield requests and are sent answers; the error that a request ends in is thrown in at the `yield`.
Nothing in them reads a clock, draws a random number that was not given to them, or touches a thread.
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

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FindVersion:
    """→ KnownVersion, or None if the chain, looked at anew, has no such version. Trainer only."""

    seq: int


@dataclass(frozen=True, slots=True)
class Sync:
    """→ KnownVersion, or None. Member only: which version completions would be made by now, after an attempt to have `step` or later.

    How long that may take is for who performs it to say. The answer may well be an older version, or None for none.
    """

    step: int


@dataclass(frozen=True, slots=True)
class Generate:
    """→ Rollouts for this lease, or None if the member is told to leave. Member only. `EngineError` if it cannot be done now."""

    round: Round
    lease: Lease
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Together:
    """→ list with the answer of each request in its order, or the `DeltawireError` that it ended in: those are not thrown."""

    requests: tuple[Get | Head | List | Put, ...]


Request: TypeAlias = Get | Head | Create | Put | List | Delete | Sleep | FindVersion | Sync | Generate | Together
Steps: TypeAlias = Generator[Request, Any, T]
Perform: TypeAlias = Callable[[FindVersion | Sync | Generate], Any]
"""Answers what a store cannot."""

MOST_TOGETHER = 16
"""So many requests of a `Together` are in flight at once."""


def run_steps(
    steps: Steps[T],
    store: Store,
    *,
    sleep: Callable[[float], object] = time.sleep,
    perform: Perform | None = None,
    pool: ThreadPoolExecutor | None = None,
) -> T:
    """Drive steps against a store until they return. Without `pool` requests are made one after the other.

    Errors of requests that are no `Exception` (a simulated death, Ctrl-C) end the steps at once, as a crash would: they do not see them.
    """

    def answer(request: Request) -> Any:
        if isinstance(request, Sleep):
            return sleep(request.seconds)
        if isinstance(request, (FindVersion, Sync, Generate)):
            if perform is None:
                raise TypeError(f"nobody is there to perform {type(request).__name__}")
            return perform(request)
        if isinstance(request, Together):
            apply = map if pool is None else pool.map
            return list(apply(lambda each: _answer_or_error(store, each), request.requests))
        return ask_store(store, request)

    return drive(steps, answer)


def _answer_or_error(store: Store, request: Get | Head | List | Put) -> Any:
    try:
        return ask_store(store, request)
    except DeltawireError as error:
        return error
