"""Reads new files of interactions and feedback, each once, and reports those that break a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from ..errors import CorruptFeedback, CorruptInteractions, UnsupportedVersion
from ..events import OnEvent, emit
from ..fleet.steps.requests import run_steps
from ..format.feedback import MAX_FEEDBACK_BYTES, FeedbackFile
from ..format.interactions import MAX_INTERACTIONS_BYTES, Interactions
from ..store import live_keys
from ..store.base import Store
from .steps.file_steps import FoundFile, LiveFiles

_File = TypeVar("_File", Interactions, FeedbackFile)


class Placed(NamedTuple, Generic[_File]):
    """A file, and when it was stored, by the store's clock, in seconds."""

    file: _File
    stored: float


class TrafficReader:
    """Reads the files of interactions and feedback of a run. Nothing of a file that breaks a rule is used.

    Parameters
    ----------
    store
        The store.
    run
        The id of the run.
    since
        Files that were stored before this time of the store, in seconds, are not read.
    besides
        A session whose files are not read.
    on_event
        Called with the event `live-file-refused`.
    """

    def __init__(self, store: Store, run: str, *, since: float, besides: str | None = None, on_event: OnEvent | None = None) -> None:
        self._store = store
        self._run = run
        self._on_event = on_event
        self._interactions = LiveFiles(
            live_keys.INTERACTIONS, live_keys.parse_interactions_key, MAX_INTERACTIONS_BYTES, since=since, besides=besides
        )
        self._feedback = LiveFiles(live_keys.FEEDBACK, live_keys.parse_feedback_key, MAX_FEEDBACK_BYTES, since=since, besides=besides)

    def interactions(self) -> Iterator[Placed[Interactions]]:
        """Yield the files of interactions that are new since the last call."""
        return self._new(self._interactions, Interactions.parse)

    def feedback(self) -> Iterator[Placed[FeedbackFile]]:
        """Yield the files of feedback that are new since the last call."""
        return self._new(self._feedback, FeedbackFile.parse)

    def _new(self, files: LiveFiles, parse: Callable[[bytes], _File]) -> Iterator[Placed[_File]]:
        is_all = False
        while not is_all:
            found, is_all = run_steps(files.read(), self._store)
            for each in found:
                file = self._parsed(each, parse)
                files.read_up_to(each)
                if file is not None:
                    yield Placed(file, each.stored)

    def _parsed(self, found: FoundFile, parse: Callable[[bytes], _File]) -> _File | None:
        why = "its content does not fit its key, or is of another run."
        try:
            file = None if found.data is None else parse(found.data)
        except (CorruptInteractions, CorruptFeedback, UnsupportedVersion) as error:
            file, why = None, str(error)
        if file is not None and (file.run, file.gateway, file.number) == (self._run, found.parts.gateway, found.parts.number):
            return file
        emit(self._on_event, "live-file-refused", key=found.key, why=why)
        return None
