"""Knows which interactions and episodes exist, so that feedback on an id that does not is refused.

The gateway adds its own interactions, and keeps their ids on disk for its next start (`id_log`). Those of other gateways are read from the
store, as far back as the longest window of a metric, because later feedback counts for none. Callers choose the ids of episodes, so each
caller has its own: the episode of another caller with the same id is another episode.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from ...events import OnEvent
from ...live.traffic_reader import TrafficReader
from ...store.base import Store
from .id_log import IdLog, OwnId

_SHORTEST = 7 * 86400.0
"""The store is read at least this many seconds back from the start of the session."""


class Known(NamedTuple):
    """The facts that are known about an interaction or an episode."""

    since: float
    """When it was answered, or some time later, by `time.monotonic`. For an episode, the latest of its interactions."""
    caller: str | None
    """The name of the caller that asked."""


class KnownIds:
    """The interactions and episodes of a run, the newest ones only. May be used from several threads.

    Parameters
    ----------
    store
        The store.
    run
        The id of the run.
    session
        The session of this gateway, whose interactions are added by `add`.
    most
        The most interactions, and the most episodes, to remember.
    log
        Keeps the ids of this gateway. None keeps them in memory only.
    longest
        Returns the longest window of the metrics in seconds.
    on_event
        Called with "live-file-refused".
    """

    def __init__(
        self,
        store: Store,
        run: str,
        session: str,
        *,
        most: int,
        log: IdLog | None = None,
        longest: Callable[[], float] = lambda: 0.0,
        on_event: OnEvent | None = None,
    ) -> None:
        self._start, self._reach = time.time(), _SHORTEST
        self._read_from = functools.partial(TrafficReader, store, run, besides=session, on_event=on_event)
        self._reader = self._read_from(since=self._start - self._reach)
        self._most, self._log, self._longest = most, log, longest
        self._inferences: OrderedDict[str, Known] = OrderedDict()
        self._episodes: OrderedDict[tuple[str, str | None], Known] = OrderedDict()
        self._callers: dict[str, set[str | None]] = {}
        self._newest = -math.inf
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        for own in () if log is None else log.found:
            self.add(own.id, own.episode, own.caller)

    def keep(self, inference: str, episode: str | None, caller: str | None) -> None:
        """Write an interaction of this gateway down for its next start. It is known only when it was added. Raises `OSError`.

        Parameters
        ----------
        inference
            Its id.
        episode
            The id of its episode, if it has one.
        caller
            The name of the caller that asked.
        """
        if self._log is not None:
            self._log.add(OwnId(inference, episode, caller))

    def add(self, inference: str, episode: str | None, caller: str | None, *, age: float = 0.0) -> None:
        """Remember an interaction. When there are too many, the one that was added first is forgotten, or this one if it is older.

        Parameters
        ----------
        inference
            Its id.
        episode
            The id of its episode, if it has one.
        caller
            The name of the caller that asked.
        age
            How many seconds ago it was answered, at least.
        """
        known = Known(time.monotonic() - age, caller)
        with self._lock:
            self._add_inference(inference, known)
            if episode is not None:
                self._add_episode(episode, known)

    def _add_inference(self, name: str, known: Known) -> None:
        before = self._inferences.get(name)
        if before is not None:
            if before.caller == known.caller:  # the first caller keeps the id
                self._inferences[name] = min(before, known, key=lambda each: each.since)
        elif not self._is_full(self._inferences, known):
            self._inferences[name] = known
            if len(self._inferences) > self._most:
                self._inferences.popitem(last=False)

    def _add_episode(self, name: str, known: Known) -> None:
        before = self._episodes.pop((name, known.caller), None)
        if before is not None and before.since > known.since:
            known = before
        if self._is_full(self._episodes, known):
            return
        self._episodes[name, known.caller] = known
        self._callers.setdefault(name, set()).add(known.caller)
        if len(self._episodes) > self._most:
            (forgotten, owner), _ = self._episodes.popitem(last=False)
            self._callers[forgotten].discard(owner)
            if not self._callers[forgotten]:
                del self._callers[forgotten]

    def _is_full(self, table: OrderedDict[Any, Known], known: Known) -> bool:
        """Tell whether there are so many that one which is older than all of them is left out."""
        return len(table) >= self._most and known.since < next(iter(table.values())).since

    def inference(self, name: str) -> Known | None:
        """Return what is known about an interaction, or None."""
        return self._inferences.get(name)

    def episode(self, name: str, caller: str | None) -> Known | None:
        """Return what is known about an episode of a caller, or None."""
        return self._episodes.get((name, caller))

    def callers(self, episode: str) -> set[str | None]:
        """Return the callers that have an episode with this id."""
        with self._lock:
            return set(self._callers.get(episode, ()))

    def refresh(self) -> None:
        """Read the interactions that other sessions have stored since the last call. Raises errors of the store.

        Only the store's times tell how old they are, because the clocks of gateways may be wrong. If a metric has a longer window than
        before, the store is read again from further back.
        """
        with self._reading:
            if (longest := self._longest()) > self._reach:
                self._reach = longest
                self._reader = self._read_from(since=self._start - longest)
            for placed in self._reader.interactions():
                self._newest = max(self._newest, placed.stored)
                for one in placed.file.interactions:
                    self.add(one.id, one.episode, one.caller, age=self._newest - placed.stored)
