"""Reads new files of all gateways, in bounded pieces.

A session writes its files one after the other (docs/protocol.md §13), so a reader only looks behind the last file that it has seen. One
listing reads the new files of a session and meets the first file of the next one, so that new sessions are found too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from blake3 import blake3

from ...errors import DeltawireError, LimitExceeded, ObjectMissing
from ...fleet.steps.requests import Steps, Together
from ...store.base import ObjectInfo
from ...store.live_keys import LiveKey, start_of_file
from ...store.requests import Get, List

FILES_PER_LOOK = 1024
BYTES_PER_LOOK = 256 << 20
"""One look reads at most about this many files and bytes."""

_FILES_AT_ONCE = 16
_BYTES_AT_ONCE = 128 << 20
_LISTED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of a gateway.

    Parameters
    ----------
    key
        Its key.
    parts
        The parts of its key.
    stored
        The store's time of the file, in seconds.
    data
        Its bytes; None if they do not have the hash in the key, or are more than allowed.
    """

    key: str
    parts: LiveKey
    stored: float
    data: bytes | None


class LiveFiles:
    """The files of one kind, interactions or feedback, and how far each session was read.

    Parameters
    ----------
    prefix
        The folder of the files.
    parse_key
        Returns the parts of a key, or None for any other key.
    limit
        The size of the largest file.
    since
        Files that were stored before this time of the store, in seconds, are passed over.
    besides
        The files of this session are passed over.
    """

    def __init__(
        self, prefix: str, parse_key: Callable[[str], LiveKey | None], limit: int, *, since: float = 0.0, besides: str | None = None
    ) -> None:
        self._prefix = prefix
        self._parse_key = parse_key
        self._limit = limit
        self._since, self._besides = since, besides
        self._seen: dict[str, str] = {}
        self.next_numbers: dict[str, int] = {}
        """For each session, one more than the number of the last file that was read."""

    def skip(self, marks: Mapping[str, int]) -> None:
        """Begin with these numbers, by session, and not with the first file. Sessions that were read already are left as they are.

        Parameters
        ----------
        marks
            The number of the first file to read, by session.
        """
        for session, mark in marks.items():
            if mark > self.next_numbers.get(session, 0):
                self._seen[session] = start_of_file(self._prefix, session, mark)
                self.next_numbers[session] = mark

    def read(self, most_files: int = FILES_PER_LOOK) -> Steps[tuple[list[FoundFile], bool]]:
        """Return files that were not read before, in the order of their keys, and whether these are all.

        Parameters
        ----------
        most_files
            The most files to read.
        """
        listed, is_all = yield from self._new(most_files)
        found: list[FoundFile] = []
        total = 0
        while listed:
            group: list[ObjectInfo] = []
            while listed and len(group) < _FILES_AT_ONCE and sum(info.size for info in group) < _BYTES_AT_ONCE:
                group.append(listed.pop(0))
            answers = yield Together(tuple(Get(info.key, self._limit) for info in group))
            for info, answer in zip(group, answers, strict=True):
                parts = self._parse_key(info.key)
                if parts is None:
                    continue
                if isinstance(answer, bytes) and blake3(answer).hexdigest() != parts.blake3:  # perhaps it was damaged on the way here
                    (answer,) = yield Together((Get(info.key, self._limit),))
                if isinstance(answer, DeltawireError) and not isinstance(answer, (ObjectMissing, LimitExceeded)):
                    raise answer
                data = answer if isinstance(answer, bytes) and blake3(answer).hexdigest() == parts.blake3 else None
                if not isinstance(answer, ObjectMissing):  # otherwise a trainer has swept it meanwhile
                    found.append(FoundFile(info.key, parts, info.modified.timestamp(), data))
                total += info.size
            if listed and total >= BYTES_PER_LOOK:
                return found, False
        return found, is_all

    def read_up_to(self, file: FoundFile) -> None:
        """Note that a file was used, with all before it of its session. Until then a later look reads it again.

        Parameters
        ----------
        file
            The file.
        """
        self._seen[file.parts.gateway] = file.key
        self.next_numbers[file.parts.gateway] = file.parts.number + 1

    def _new(self, most: int) -> Steps[tuple[list[ObjectInfo], bool]]:
        new: list[ObjectInfo] = []
        after: str | None = None
        while True:
            page: list[ObjectInfo] = yield List(self._prefix, after=after, most=_LISTED_AT_ONCE)
            jump: str | None = None
            for info in page:
                parts = self._parse_key(info.key)
                seen = "" if parts is None else self._seen.get(parts.gateway, "")
                after = info.key
                if parts is not None and info.key <= seen:
                    jump = seen
                    break
                if parts is not None and (info.modified.timestamp() < self._since or parts.gateway == self._besides):
                    self._seen[parts.gateway] = info.key
                elif parts is not None:
                    if len(new) >= most:
                        return new, False
                    new.append(info)
            if jump is not None:
                after = jump
            elif len(page) < _LISTED_AT_ONCE:
                return new, True
