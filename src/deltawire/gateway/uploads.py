"""Makes files of interactions from the journal and puts them into the store, on a separate thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ..chain.log import ChainLog
from ..chain.version import Version
from ..errors import DeltawireError, StoreError, VersionUnknown
from ..events import OnEvent, emit
from ..format.interactions import Interactions
from ..store.live_keys import INTERACTIONS, LiveKey, interactions_key, parse_interactions_key
from .answers import file_of
from .journal import Journal, SealedFile

_MOST_ROWS, _MOST_ROW_BYTES = 512, 8 << 20
_RETRY_SECONDS = 1.0


class Uploads:
    """Brings journals into the store.

    Parameters
    ----------
    log
        The chain, and the store that gets the files. Only the thread of this object uses it.
    journals
        The journal of this session first, and then those of sessions that ended.
    flush
        Seconds after which rows go to the store, even if they are few.
    on_event
        Called with "interactions-stored", "interaction-unusable", "recording-waits" and "journal-recovered".
    """

    def __init__(self, log: ChainLog, journals: list[Journal], *, flush: float, on_event: OnEvent | None = None) -> None:
        self._log, self._store = log, log.store
        self._own, self._ended = journals[0], journals[1:]
        self._numbers: dict[str, int] = {self._own.session: 0}
        self._flush = flush
        self._on_event = on_event
        self._problem: str | None = None
        self._rotated = time.monotonic()
        self._wanted = threading.Condition()
        self._is_closing = False
        self._is_hurried = False
        self._thread = threading.Thread(target=self._run, name="deltawire-uploads", daemon=True)

    def start(self) -> None:
        """Begin to upload."""
        self._thread.start()

    def row_added(self) -> None:
        """Upload at once if there are enough rows."""
        if self._own.rows >= _MOST_ROWS or self._own.row_bytes >= _MOST_ROW_BYTES:
            self.hurry()

    def hurry(self) -> None:
        """Upload at once."""
        with self._wanted:
            self._is_hurried = True
            self._wanted.notify_all()

    def close(self, seconds: float) -> None:
        """Upload what there is, for at most this long. The rest stays in the journal, for the next session."""
        with self._wanted:
            self._is_closing = True
            self._wanted.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._wanted:
                self._wanted.wait_for(lambda: self._is_closing or self._is_hurried, self._flush)
                is_last, self._is_hurried = self._is_closing, False
            try:
                self.step()
            except (DeltawireError, OSError) as error:
                self._report(str(error))
                if is_last:
                    return
                with self._wanted:
                    self._wanted.wait_for(lambda: self._is_closing, _RETRY_SECONDS)
                continue
            self._report(None)
            if is_last:
                return

    def step(self) -> None:
        """Upload everything that waits. Raises errors of the store, and `OSError` of the journal."""
        for journal in list(self._ended):
            self._upload(journal)
            if journal.is_empty():  # intents of an ended session are resolved elsewhere, and give rows
                self._ended.remove(journal)
                journal.close(remove=True)
                emit(self._on_event, "journal-recovered", session=journal.session)
        self._upload(self._own)

    def _upload(self, journal: Journal) -> None:
        for file in journal.files():
            self._put(journal, file)
        journal.rotate()
        for segment in journal.ended_segments():
            self._put_segment(journal, segment)

    def _put_segment(self, journal: Journal, segment: int) -> None:
        rows = journal.read_segment(segment)
        number = self._number(journal)
        data = self._data(journal.session, number, rows) if rows else None
        if data is None:
            journal.forget(segment, None)
            return
        file = journal.seal(segment, number, data)
        self._numbers[journal.session] = number + 1
        self._put(journal, file, len(rows))

    def _put(self, journal: Journal, file: SealedFile, rows: int | None = None) -> None:
        data = file.path.read_bytes()
        start = time.monotonic()
        self._store.put(interactions_key(LiveKey(journal.session, file.number, file.blake3)), data)
        self._numbers[journal.session] = max(self._number(journal), file.number + 1)
        journal.forget(file.segment, file)
        seconds = time.monotonic() - start
        emit(self._on_event, "interactions-stored", number=file.number, interactions=rows, bytes=len(data), seconds=seconds)

    def _number(self, journal: Journal) -> int:
        """Return the number of the next file. For an ended session it follows those in the store and in the journal."""
        if journal.session not in self._numbers:
            keys = (parse_interactions_key(info.key) for info in self._store.list(f"{INTERACTIONS}{journal.session}/"))
            taken = [key.number for key in keys if key is not None] + [file.number for file in journal.files()]
            self._numbers[journal.session] = max(taken, default=-1) + 1
        return self._numbers[journal.session]

    def _data(self, session: str, number: int, rows: list[dict[str, Any]]) -> bytes | None:
        """Return the bytes of a file. Rows that cannot be used are left out. Returns None if no row can be used."""
        try:
            return self._file(session, number, rows).to_bytes()
        except StoreError:
            raise
        except DeltawireError as error:
            if error.retryable and not isinstance(error, VersionUnknown):
                raise
            if len(rows) == 1:
                emit(self._on_event, "interaction-unusable", reason=str(error))
                return None
        halves = [row for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]) for row in self._usable(session, number, part)]
        return self._file(session, number, halves).to_bytes() if halves else None

    def _usable(self, session: str, number: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if self._data(session, number, [row]) is not None]

    def _file(self, session: str, number: int, rows: list[dict[str, Any]]) -> Interactions:
        version: Callable[[int], Version] = self._log.version
        return file_of(session, number, self._log.run.id, rows, version, on_event=self._on_event)

    def _report(self, problem: str | None) -> None:
        """Tell once why nothing can be uploaded."""
        if problem != self._problem:
            self._problem = problem
            if problem is not None:
                emit(self._on_event, "recording-waits", reason=problem)
