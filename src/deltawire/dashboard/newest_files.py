"""Finds the newest files of all gateways, without a listing of the older ones.

The files of a session are numbered without gaps (docs/protocol.md §13), so the newest one is found by asking for numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from ..format.live_parts import MAX_NUMBER
from ..store.base import ObjectInfo, Store
from ..store.live_keys import LiveKey, session_folder, start_of_file

MOST_SESSIONS = 64
_SESSIONS_EVERY = 15
"""New sessions are looked for, and sessions without new files are asked again, in every 15th look."""


class NewFile(NamedTuple):
    """A file that is new since the last look."""

    info: ObjectInfo
    parts: LiveKey


class NewestFiles:
    """The files of one kind, interactions or feedback. A look that finds none takes a listing for each session that had new files lately.

    Parameters
    ----------
    store
        The store.
    prefix
        The folder of the files.
    parse_key
        Returns the parts of a key, or None for any other key.
    most
        The most new files of a session in one look, the newest ones. Those before them are left out.
    """

    def __init__(self, store: Store, prefix: str, parse_key: Callable[[str], LiveKey | None], *, most: int) -> None:
        self._store = store
        self._prefix = prefix
        self._parse_key = parse_key
        self._most = most
        self._last: dict[str, int] = {}
        self._active: list[str] = []
        self._looks = 0
        self.left_out = 0
        """The number of files that are never read."""

    def look(self) -> list[NewFile]:
        """Return the new files. Raises errors of the store, after which it can be called again."""
        asks_all = not self._last or self._looks % _SESSIONS_EVERY == 0
        if asks_all:
            self._last = {session: self._last.get(session, -1) for session in self._sessions()}
        new = {session: self._new(session) for session in (self._last if asks_all else self._active)}
        if asks_all:
            self._active = [session for session, files in new.items() if files]
        self._looks += 1
        return [file for files in new.values() for file in files]

    def note(self, found: Sequence[NewFile], taken: Sequence[NewFile]) -> None:
        """Note that these new files were found, and some of them read. The next look does not return them again.

        Parameters
        ----------
        found
            What `look` returned.
        taken
            Those that were read. The others are left out.
        """
        for file in found:
            before = self._last[file.parts.gateway]
            self._last[file.parts.gateway] = max(before, file.parts.number)
            self.left_out += max(file.parts.number - before, 0)
        self.left_out -= len(taken)

    def _sessions(self) -> list[str]:
        """Return the sessions that have files, a bounded number. Each listing begins after the last possible file of the one before."""
        found: list[str] = []
        after: str | None = None
        for _ in range(2 * MOST_SESSIONS):  # the folder may hold other objects
            info = next(iter(self._store.list(self._prefix, after=after)), None)
            if info is None or len(found) == MOST_SESSIONS:
                break
            parts = self._parse_key(info.key)
            after = info.key if parts is None else start_of_file(self._prefix, parts.gateway, MAX_NUMBER + 1)
            if parts is not None and parts.gateway not in found:
                found.append(parts.gateway)
        return found

    def _new(self, session: str) -> list[NewFile]:
        """Return the newest of the files after the last one that was noted."""
        last = self._last[session]
        if last < 0:  # older ones may have been swept
            first = self._after(session, last, 1)
            if not first:
                return []
            last = self._last[session] = first[0].parts.number - 1
        new = self._after(session, last, self._most)
        if len(new) < self._most:
            return new
        newest = self._newest(session, new[-1].parts.number)
        return self._after(session, max(last, newest - self._most), self._most)

    def _newest(self, session: str, number: int) -> int:
        """Return the number of the newest file, from the number of any file: by larger and larger steps, and then by smaller ones."""
        step = self._most
        while found := self._after(session, number + step, 1):
            number, step = found[0].parts.number, 2 * step
        while step > self._most:
            step //= 2
            if found := self._after(session, number + step, 1):
                number = found[0].parts.number
        rest = self._after(session, number, self._most)
        return rest[-1].parts.number if rest else number

    def _after(self, session: str, number: int, most: int) -> list[NewFile]:
        """Return the first files of a session whose numbers are higher than this one."""
        after = start_of_file(self._prefix, session, number + 1)
        infos = islice(self._store.list(session_folder(self._prefix, session), after=after), most)
        return [NewFile(info, parts) for info in infos if (parts := self._parse_key(info.key)) is not None]
