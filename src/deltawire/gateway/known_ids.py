"""Knows which interactions and episodes exist, so that feedback on an id that does not is refused.

The gateway adds its own interactions. Those of other gateways, and of its own earlier sessions, are read from the store.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

from ..errors import CorruptInteractions, ObjectMissing
from ..format.content_hash import content_hash
from ..format.interactions import MAX_INTERACTIONS_BYTES, Interactions
from ..store.base import Store
from ..store.live_keys import INTERACTIONS, LiveKey, interactions_key, parse_interactions_key

_MOST_FILES = 1000
"""At most this many files are read at once, the newest ones."""


class Known(NamedTuple):
    """The facts that are known about an interaction or an episode."""

    time: int
    """When it was answered, in milliseconds by a gateway's clock. For an episode, the latest of its interactions."""
    caller: str | None
    """The name of the caller that asked."""


class KnownIds:
    """The interactions and episodes of a run, the newest ones only. May be used from several threads.

    Parameters
    ----------
    most
        The most interactions, and the most episodes, to remember.
    run
        The id of the run.
    session
        The session of this gateway, whose interactions are added by `add`.
    """

    def __init__(self, most: int, run: str, session: str) -> None:
        self._most, self._run, self._own = most, run, session
        self._inferences: OrderedDict[str, Known] = OrderedDict()
        self._episodes: OrderedDict[str, Known] = OrderedDict()
        self._read: dict[str, int] = {}
        self._lock = threading.Lock()
        self._reading = threading.Lock()

    def add(self, inference: str, time: int, episode: str | None, caller: str | None) -> None:
        """Remember an interaction. When there are too many, the one that was added first is forgotten."""
        with self._lock:
            self._inferences[inference] = Known(time, caller)
            if len(self._inferences) > self._most:
                self._inferences.popitem(last=False)
            if episode is not None:
                self._episodes.pop(episode, None)
                self._episodes[episode] = Known(time, caller)
                if len(self._episodes) > self._most:
                    self._episodes.popitem(last=False)

    def inference(self, name: str) -> Known | None:
        """Return what is known about an interaction, or None."""
        return self._inferences.get(name)

    def episode(self, name: str) -> Known | None:
        """Return what is known about an episode, or None."""
        return self._episodes.get(name)

    def refresh(self, store: Store) -> None:
        """Read the interactions that other sessions have stored since the last call. Raises errors of the store.

        Parameters
        ----------
        store
            The store.
        """
        with self._reading:
            found = ((parse_interactions_key(info.key), info.modified) for info in store.list(INTERACTIONS))
            new = [
                (modified, key)
                for key, modified in found
                if key is not None and key.gateway != self._own and key.number > self._read.get(key.gateway, -1)
            ]
            for _, key in sorted(new)[-_MOST_FILES:]:
                self._read_file(store, key)
                self._read[key.gateway] = max(key.number, self._read.get(key.gateway, -1))

    def _read_file(self, store: Store, key: LiveKey) -> None:
        try:
            data = store.get(interactions_key(key), limit=MAX_INTERACTIONS_BYTES)
            if content_hash(data) != key.blake3:
                return
            file = Interactions.parse(data)
        except (ObjectMissing, CorruptInteractions):  # it was swept, or is not a gateway's
            return
        if (file.run, file.gateway) == (self._run, key.gateway):
            for one in file.interactions:
                self.add(one.id, one.time, one.episode, one.caller)
