"""Reads new files of interactions and feedback from the store, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Generic, NamedTuple, TypeVar

from ..errors import CorruptFeedback, CorruptInteractions, LimitExceeded, ObjectMissing, UnsupportedVersion
from ..events import OnEvent, emit
from ..format.content_hash import content_hash
from ..format.feedback import MAX_FEEDBACK_BYTES, FeedbackFile
from ..format.interactions import MAX_INTERACTIONS_BYTES, Interactions
from ..store import live_keys
from ..store.base import ObjectInfo, Store
from ..store.live_keys import LiveKey

_File = TypeVar("_File", Interactions, FeedbackFile)


class Placed(NamedTuple, Generic[_File]):
    """A file, and when it was stored, by the store's clock."""

    file: _File
    stored: datetime


class TrafficReader:
    """Reads the files of interactions and feedback of a run. Files that break a rule are reported, and nothing of them is used.

    A session numbers its files without gaps and writes them in order. So only keys above the last one of each session are new.

    Parameters
    ----------
    store
        The store.
    run
        The id of the run.
    since
        Files that were stored before this time, by the store's clock, are not read.
    besides
        A session whose files are not read.
    on_event
        Called with the event `live-file-refused`.
    """

    def __init__(self, store: Store, run: str, *, since: datetime, besides: str | None = None, on_event: OnEvent | None = None) -> None:
        self._store = store
        self._run = run
        self._since = since
        self._besides = besides
        self._on_event = on_event
        self._seen: dict[str, dict[str, str]] = {live_keys.INTERACTIONS: {}, live_keys.FEEDBACK: {}}

    def interactions(self) -> Iterator[Placed[Interactions]]:
        """Yield the files of interactions that are new since the last call."""
        return self._new(live_keys.INTERACTIONS, live_keys.parse_interactions_key, Interactions.parse, MAX_INTERACTIONS_BYTES)

    def feedback(self) -> Iterator[Placed[FeedbackFile]]:
        """Yield the files of feedback that are new since the last call."""
        return self._new(live_keys.FEEDBACK, live_keys.parse_feedback_key, FeedbackFile.parse, MAX_FEEDBACK_BYTES)

    def _new(
        self, folder: str, parse_key: Callable[[str], LiveKey | None], parse: Callable[[bytes], _File], limit: int
    ) -> Iterator[Placed[_File]]:
        for key, info in self._new_keys(folder, parse_key):
            if info.modified >= self._since and key.gateway != self._besides:
                try:
                    data = self._store.get(info.key, limit=limit)
                    file = parse(data)
                except ObjectMissing:
                    continue  # it was swept
                except (CorruptInteractions, CorruptFeedback, UnsupportedVersion, LimitExceeded) as error:
                    emit(self._on_event, "live-file-refused", key=info.key, why=str(error))
                    continue
                if (file.run, file.gateway, file.number, content_hash(data)) != (self._run, key.gateway, key.number, key.blake3):
                    emit(self._on_event, "live-file-refused", key=info.key, why="its content does not fit its key, or is of another run.")
                    continue
                yield Placed(file, info.modified)

    def _new_keys(self, folder: str, parse_key: Callable[[str], LiveKey | None]) -> Iterator[tuple[LiveKey, ObjectInfo]]:
        """Yield the new keys. For each session that is known, the listing starts anew after its last key."""
        seen, after, jumped = self._seen[folder], None, True
        while jumped:
            jumped = False
            for info in self._store.list(folder, after=after):
                key = parse_key(info.key)
                if key is None:
                    continue
                last = seen.get(key.gateway, "")
                if info.key <= last:
                    after, jumped = last, True
                    break
                yield key, info
                seen[key.gateway] = info.key
