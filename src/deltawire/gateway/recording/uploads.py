"""Makes files of interactions from the journal and puts them into the store, on a separate thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ...chain.log import ChainLog
from ...chain.version import Version
from ...errors import DeltawireError, LimitExceeded, StoreError, VersionUnknown
from ...events import OnEvent, emit
from ...format.interactions import Interactions
from ...store.live_keys import INTERACTIONS, LiveKey, interactions_key, parse_interactions_key
from .answers import file_of
from .journal import Journal, SealedFile

_RETRY_SECONDS = 1.0


class Uploads:
    """Brings journals into the store, and onto the disk meanwhile.

    Parameters
    ----------
    log
        The chain, and the store that gets the files. Only one thread of this object uses it.
    journals
        The journal of this session first, and then those of sessions that ended.
    flush
        Seconds after which rows go to the store, even if they are few, and after which what was written is on the disk.
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
        self._sync_began: float | None = None
        self._wanted = threading.Condition()
        self._is_closing = False
        self._is_hurried = False
        self._thread = threading.Thread(target=self._run, name="deltawire-uploads", daemon=True)
        self._syncing = threading.Thread(target=self._run_sync, name="deltawire-journal", daemon=True)

    def start(self) -> None:
        """Begin to upload."""
        self._thread.start()
        self._syncing.start()

    @property
    def sync_seconds(self) -> float:
        """How long the sync of the journals has taken that runs at present. 0 if none runs."""
        began = self._sync_began
        return 0.0 if began is None else time.monotonic() - began

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
        deadline = time.monotonic() + seconds
        for thread in (self._thread, self._syncing):
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run_sync(self) -> None:
        """Sync the journals again and again. The thread that uploads may wait for the store meanwhile."""
        while not self._is_closing:
            self._sync_began = time.monotonic()
            try:
                self._sync()
            except OSError as error:
                self._report(f"the journal cannot be synced: {error}")
            finally:
                self._sync_began = None
            with self._wanted:
                self._wanted.wait_for(lambda: self._is_closing, self._flush)

    def _sync(self) -> None:
        for journal in (self._own, *list(self._ended)):
            if not journal.is_closed:
                journal.sync()

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
        self._sync()
        for journal in list(self._ended):
            self._upload(journal)
            if journal.is_empty():  # intents of an ended session are resolved elsewhere, and give rows
                self._ended.remove(journal)
                journal.close(remove=True)
                emit(self._on_event, "journal-recovered", session=journal.session)
        self._upload(self._own)

    def _upload(self, journal: Journal) -> None:
        for row_log in journal.sealed_row_logs():
            journal.forget_row_log(row_log)
        for file in journal.files():
            self._put(journal, file)
        journal.rotate()
        for row_log in journal.ended_row_logs():
            self._put_row_log(journal, row_log)

    def _put_row_log(self, journal: Journal, row_log: int) -> None:
        number, counts = self._number(journal), list[int]()
        files = journal.seal(row_log, self._files(journal, row_log, number, counts))
        self._numbers[journal.session] = number + len(files)
        journal.forget_row_log(row_log)
        for file, count in zip(files, counts, strict=True):
            self._put(journal, file, count)

    def _files(self, journal: Journal, row_log: int, number: int, counts: list[int]) -> Iterator[tuple[int, bytes]]:
        """Yield the numbers and the bytes of the files that a row log becomes, and note how many rows each has."""
        for part in journal.parts(row_log):
            for rows, data in self._data(journal.session, number, part):
                yield number, data
                counts.append(rows)
                number += 1

    def _put(self, journal: Journal, file: SealedFile, rows: int | None = None) -> None:
        start = time.monotonic()
        if (data := file.read()) is None:
            emit(self._on_event, "interaction-unusable", reason=f"the journal's file {file.path.name} is damaged.")
            journal.forget_file(file)
            return
        self._store.put(interactions_key(LiveKey(journal.session, file.number, file.blake3)), data)
        self._numbers[journal.session] = max(self._number(journal), file.number + 1)
        journal.forget_file(file)
        seconds = time.monotonic() - start
        emit(self._on_event, "interactions-stored", number=file.number, interactions=rows, bytes=len(data), seconds=seconds)

    def _number(self, journal: Journal) -> int:
        """Return the number of the next file. For an ended session it follows those in the store and in the journal."""
        if journal.session not in self._numbers:
            keys = (parse_interactions_key(info.key) for info in self._store.list(f"{INTERACTIONS}{journal.session}/"))
            taken = [key.number for key in keys if key is not None] + [file.number for file in journal.files()]
            self._numbers[journal.session] = max(taken, default=-1) + 1
        return self._numbers[journal.session]

    def _data(self, session: str, number: int, rows: list[dict[str, Any]]) -> list[tuple[int, bytes]]:
        """Return how many rows each of the next files has, and its bytes. It is one file if that has room for all rows.

        Rows that cannot be used are left out.
        """
        made = self._bytes(session, number, rows)
        if isinstance(made, bytes):
            return [(len(rows), made)]
        usable = rows if isinstance(made, LimitExceeded) else self._usable(session, number, rows)
        if len(usable) < len(rows):
            return self._data(session, number, usable) if usable else []
        if len(rows) == 1:
            emit(self._on_event, "interaction-unusable", reason=str(made))
            return []
        left = self._data(session, number, rows[: len(rows) // 2])
        return left + self._data(session, number + len(left), rows[len(rows) // 2 :])

    def _usable(self, session: str, number: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        made = self._bytes(session, number, rows)
        if isinstance(made, bytes | LimitExceeded):
            return rows
        if len(rows) == 1:
            emit(self._on_event, "interaction-unusable", reason=str(made))
            return []
        half = len(rows) // 2
        return [row for part in (rows[:half], rows[half:]) for row in self._usable(session, number, part)]

    def _bytes(self, session: str, number: int, rows: list[dict[str, Any]]) -> bytes | DeltawireError:
        """Return the bytes of a file, or why these rows are none. Raises errors that may be over later."""
        try:
            return self._file(session, number, rows).to_bytes()
        except StoreError:
            raise
        except DeltawireError as error:
            if error.retryable and not isinstance(error, VersionUnknown):
                raise
            return error

    def _file(self, session: str, number: int, rows: list[dict[str, Any]]) -> Interactions:
        version: Callable[[int], Version] = self._log.version
        return file_of(session, number, self._log.run.id, rows, version, on_event=self._on_event)

    def _report(self, problem: str | None) -> None:
        """Tell once why nothing can be uploaded."""
        if problem != self._problem:
            self._problem = problem
            if problem is not None:
                emit(self._on_event, "recording-waits", reason=problem)
