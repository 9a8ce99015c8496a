"""The output of a member, line by line: as events, and kept in bounded memory until it is fetched."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias

from ..events import Event

OnLine: TypeAlias = Callable[[str, bool], object]
"""Called with each line that a member prints, without its end, and whether it went to stderr. Called on any thread, one line at a time."""


class Line(NamedTuple):
    """One line that a member printed.

    Parameters
    ----------
    text
        The line without its end.
    is_error
        Whether it went to stderr.
    """

    text: str
    is_error: bool


def event_of(member: str, line: str, is_error: bool) -> Event:
    """Return what a member started with `--json` printed, as an event with the member's name and a time.

    An error that ended the member becomes the event "failed". Any other text comes from the user's own code or from a library, and becomes
    the event "output".

    Parameters
    ----------
    member
        The member's name.
    line
        The line, without its end.
    is_error
        Whether it went to stderr.
    """
    if not is_error and isinstance(found := _parse(line), dict):
        error = found.get("error")
        if isinstance(error, dict) and "event" not in found:
            return Event("failed", {"member": member, "error": str(error.get("type")), "reason": str(error.get("message"))})
        try:
            return Event.from_json({"member": member, **found})
        except ValueError:
            pass  # an object that the user's own code printed
    return Event("output", {"member": member, "line": line, "stream": "stderr" if is_error else "stdout"})


def _parse(line: str) -> Any:
    try:
        return json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


class OutputBuffer:
    """Keeps lines until they are taken, in the order in which they were added. It may be used from several threads.

    Parameters
    ----------
    limit
        When the lines that were not taken have more characters than this together, the oldest ones are dropped and counted.
    """

    def __init__(self, limit: int = 4 << 20) -> None:
        self._limit = limit
        self._lines: deque[Line] = deque()
        self._size = 0
        self._dropped = 0
        self._changed = threading.Condition()

    def add(self, text: str, is_error: bool) -> None:
        """Add a line. Never waits until lines are taken."""
        with self._changed:
            self._lines.append(Line(text, is_error))
            self._size += len(text) + 1  # an empty line takes memory, too
            while self._size > self._limit:
                self._remove()
                self._dropped += 1
            self._changed.notify_all()

    def take(self, seconds: float, most: int = 64 << 10) -> tuple[int, list[Line]]:
        """Wait up to `seconds` for a line. Return how many lines were dropped since the last call, and the next lines.

        The lines have at most `most` characters together, but there is at least one line if there are any.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._dropped, seconds)
            dropped, self._dropped = self._dropped, 0
            taken: list[Line] = []
            size = 0
            while self._lines and (not taken or size + len(self._lines[0].text) < most):
                size += len(self._lines[0].text) + 1
                taken.append(self._remove())
            return dropped, taken

    def _remove(self) -> Line:
        line = self._lines.popleft()
        self._size -= len(line.text) + 1
        return line
