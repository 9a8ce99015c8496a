"""Knows which interactions and episodes exist, so that feedback on an id that does not is refused.

The gateway adds its own interactions. Those of other gateways, and of its own earlier sessions, are read from the store. Callers choose the
ids of episodes, so each caller has its own: the episode of another caller with the same id is another episode.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from typing import NamedTuple

from ..events import OnEvent
from ..live.traffic_reader import TrafficReader
from ..store.base import Store

_OLDEST = 7 * 86400.0
"""Interactions of other sessions that were stored more seconds ago, when this one began, are not known."""


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
    on_event
        Called with "live-file-refused".
    """

    def __init__(self, store: Store, run: str, session: str, *, most: int, on_event: OnEvent | None = None) -> None:
        self._reader = TrafficReader(store, run, since=time.time() - _OLDEST, besides=session, on_event=on_event)
        self._most = most
        self._inferences: OrderedDict[str, Known] = OrderedDict()
        self._episodes: OrderedDict[tuple[str, str | None], Known] = OrderedDict()
        self._callers: dict[str, set[str | None]] = {}
        self._newest = -math.inf
        self._lock = threading.Lock()
        self._reading = threading.Lock()

    def add(self, inference: str, episode: str | None, caller: str | None, *, age: float = 0.0) -> None:
        """Remember an interaction. When there are too many, the one that was added first is forgotten.

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
            self._inferences.setdefault(inference, known)  # the first caller keeps the id
            if len(self._inferences) > self._most:
                self._inferences.popitem(last=False)
            if episode is not None:
                self._episodes.pop((episode, caller), None)
                self._episodes[episode, caller] = known
                self._callers.setdefault(episode, set()).add(caller)
                if len(self._episodes) > self._most:
                    (forgotten, owner), _ = self._episodes.popitem(last=False)
                    self._callers[forgotten].discard(owner)
                    if not self._callers[forgotten]:
                        del self._callers[forgotten]

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

        Only the store's times tell how old they are, because the clocks of gateways may be wrong.
        """
        with self._reading:
            for placed in self._reader.interactions():
                self._newest = max(self._newest, placed.stored)
                for one in placed.file.interactions:
                    self.add(one.id, one.episode, one.caller, age=self._newest - placed.stored)
