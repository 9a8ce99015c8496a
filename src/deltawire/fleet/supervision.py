"""Keeps so many members running, wherever they run: who dies is started again, within bounds; who leaves is let go."""

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


class Lasting(str):
    """What ended a member, and would end it again if it were started again."""


class Running(Protocol):
    """A member that was started, in a process of its own."""

    def ending(self) -> str | None:
        """None while it runs; then "" if it left as it should, else what ended it (`Lasting` if that does not heal)."""

    def leave(self) -> None:
        """Ask it to leave; returns at once, and does nothing if it has ended."""

    def kill(self) -> None:
        """End it on the spot."""


@dataclass(slots=True)
class _Post:
    """A place for a member, whoever fills it at the moment."""

    name: str
    running: Running | None = None
    due: float = 0.0
    deaths: deque[float] = field(default_factory=deque)
    is_given_up: bool = False


class Supervisor:
    """Keeps a member running for each name, by `start(name)`.

    One that died is started again after a pause that grows with each death, but no more than `restarts` times in `within` seconds: what
    dies that often would die again. One that ended because of what does not heal is given up at once. One that left (exit code 0: the
    trainer said that the run is over) is not started again. Events: "member-started", "member-left", "member-died", "member-given-up".
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
        self._posts = [_Post(name) for name in names]
        self._start = start
        self._restarts = restarts
        self._within = within
        self._pause = pause
        self._grace = grace
        self._on_event = on_event
        self._clock = clock

    def run(self, stop: threading.Event) -> bool:
        """Return when all have left or were given up; or, once `stop` is set, when all were asked to leave and have, or were killed after
        `grace` seconds. Whether none was given up."""
        try:
            while not stop.is_set() and self.look():
                stop.wait(_LOOK)
        finally:
            self._end()
        return not any(post.is_given_up for post in self._posts)

    def look(self) -> bool:
        """Take note of who ended, and start who is due. Whether there is anybody to look after still."""
        for post in self._posts:
            if post.running is not None and (ending := post.running.ending()) is not None:
                post.running = None
                self._note(post, ending)
            if post.running is None and post.due <= self._clock():
                emit(self._on_event, "member-started", member=post.name, restarts=len(post.deaths))
                try:
                    post.running = self._start(post.name)
                except Exception as error:  # a cluster that is gone, or a machine out of processes: as if it had died at once
                    self._note(post, f"{type(error).__name__}: {error}")
        return any(post.running is not None or post.due != _NEVER for post in self._posts)

    def _note(self, post: _Post, ending: str) -> None:
        if not ending:
            post.due = _NEVER
            emit(self._on_event, "member-left", member=post.name)
            return
        now = self._clock()
        while post.deaths and post.deaths[0] < now - self._within:
            post.deaths.popleft()
        post.deaths.append(now)
        emit(self._on_event, "member-died", member=post.name, reason=ending, deaths=len(post.deaths))
        is_lasting = isinstance(ending, Lasting)
        if is_lasting or len(post.deaths) > self._restarts:
            post.due, post.is_given_up = _NEVER, True
            emit(self._on_event, "member-given-up", member=post.name, reason=ending, lasting=is_lasting)
        else:
            post.due = now + min(self._pause * 2.0 ** (len(post.deaths) - 1), _LONGEST_PAUSE)

    def _end(self) -> None:
        left = [post for post in self._posts if post.running is not None]
        for post in left:
            assert post.running is not None
            post.running.leave()
        deadline = self._clock() + self._grace
        while left := [post for post in left if post.running is not None and post.running.ending() is None]:
            if self._clock() >= deadline:
                break
            time.sleep(_LOOK / 4)
        for post in left:
            assert post.running is not None
            post.running.kill()


_NEVER = float("inf")
