"""Keeps members running, wherever they run. A member that dies is started again, within bounds; one that leaves is not."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..events import OnEvent, emit

_LOOK = 0.2
_LONGEST_PAUSE = 60.0
_NEVER = float("inf")


class PermanentFailure(str):
    """The reason why a member ended, if it would end again for the same reason."""


class Running(Protocol):
    """A member that was started in a separate process."""

    def ending(self) -> str | None:
        """Return None while the member runs, "" if it left as it should, and otherwise the reason why it ended.

        The reason is a `PermanentFailure` if the member would end again for it.
        """

    def leave(self) -> None:
        """Ask the member to leave, and return at once. Do nothing if it has ended."""

    def kill(self) -> None:
        """Kill the member."""


@dataclass(slots=True)
class _Entry:
    """One name that a member must run under, and the process that runs under it now."""

    name: str
    running: Running | None = None
    due: float = 0.0
    deaths: deque[float] = field(default_factory=deque)
    is_given_up: bool = False


class Supervisor:
    """Keeps one member running for each name.

    A member that died is started again after a pause that grows with each death. One that left (exit code 0: the trainer said that the run
    is over) is not started again. Events: "member-started", "member-left", "member-died", "member-given-up".

    Parameters
    ----------
    names
        The names of the members.
    start
        Starts the member of a name.
    restarts
        How often a member is started again in `within` seconds. A member that dies more often is given up, and so is one that ended with a
        `PermanentFailure`.
    within
        The period that `restarts` counts, in seconds.
    pause
        Seconds before the first restart. Each further pause is twice as long, up to a minute.
    grace
        How many seconds members may take to leave before they are killed.
    on_event
        Called with every event.
    clock
        Returns seconds that never run backwards.
    """

    def __init__(
        self,
        names: Sequence[str],
        start: Callable[[str], Running],
        *,
        restarts: int = 10,
        within: float = 3600.0,
        pause: float = 1.0,
        grace: float = 30.0,
        on_event: OnEvent | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entries = [_Entry(name) for name in names]
        self._start = start
        self._restarts = restarts
        self._within = within
        self._pause = pause
        self._grace = grace
        self._on_event = on_event
        self._clock = clock

    def run(self, stop: threading.Event) -> bool:
        """Run until all members have left or were given up. Return whether none was given up.

        Once `stop` is set, ask all members to leave, and kill those that have not left after `grace` seconds.

        Parameters
        ----------
        stop
            Tells the supervisor to end.
        """
        try:
            while not stop.is_set() and self.look():
                stop.wait(_LOOK)
        finally:
            self._end()
        return not any(entry.is_given_up for entry in self._entries)

    def look(self) -> bool:
        """Note which members have ended, and start those that are due. Return whether any member is left to supervise."""
        for entry in self._entries:
            if entry.running is not None and (ending := entry.running.ending()) is not None:
                entry.running = None
                self._note(entry, ending)
            if entry.running is None and entry.due <= self._clock():
                emit(self._on_event, "member-started", member=entry.name, restarts=len(entry.deaths))
                try:
                    entry.running = self._start(entry.name)
                except Exception as error:  # for example a lost cluster, or no more processes: it counts as a death
                    self._note(entry, f"{type(error).__name__}: {error}")
        return any(entry.running is not None or entry.due != _NEVER for entry in self._entries)

    def _note(self, entry: _Entry, ending: str) -> None:
        if not ending:
            entry.due = _NEVER
            emit(self._on_event, "member-left", member=entry.name)
            return
        now = self._clock()
        while entry.deaths and entry.deaths[0] < now - self._within:
            entry.deaths.popleft()
        entry.deaths.append(now)
        emit(self._on_event, "member-died", member=entry.name, reason=ending, deaths=len(entry.deaths))
        is_permanent = isinstance(ending, PermanentFailure)
        if is_permanent or len(entry.deaths) > self._restarts:
            entry.due, entry.is_given_up = _NEVER, True
            emit(self._on_event, "member-given-up", member=entry.name, reason=ending, permanent=is_permanent)
        else:
            entry.due = now + min(self._pause * 2.0 ** (len(entry.deaths) - 1), _LONGEST_PAUSE)

    def _end(self) -> None:
        left = [entry for entry in self._entries if entry.running is not None]
        for entry in left:
            assert entry.running is not None
            entry.running.leave()
        deadline = self._clock() + self._grace
        while left := [entry for entry in left if entry.running is not None and entry.running.ending() is None]:
            if self._clock() >= deadline:
                break
            time.sleep(_LOOK / 4)
        for entry in left:
            assert entry.running is not None
            entry.running.kill()
