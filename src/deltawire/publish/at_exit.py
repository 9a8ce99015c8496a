"""Before the process ends, what was accepted in the background is published, also if nobody closed the publisher.

Python ends a process in this order: it runs the hooks of `threading._register_atexit`, the last one first; joins threads that are no
daemons; runs the hooks of `atexit`; and stops daemon threads. Thread pools refuse work from their own hook on, which is of the first kind.
So ours must be of the first kind too, and must be registered later than theirs.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # registers its hook, which then runs after ours
import os
import threading
import time
from typing import Protocol
from weakref import WeakKeyDictionary

from ..events import OnEvent
from ..warnings import VersionsLost, warn

EXIT_SECONDS = 120.0
"""How long the end of a process waits for versions that are on their way, for all publishers together."""


class Unfinished(Protocol):
    """Something that may have accepted a version that is not in the chain yet."""

    def flush(self, timeout: float | None = None) -> None:
        """Wait for it. Raises what it failed with, or TimeoutError."""

    def on_its_way(self) -> str:
        """Say what is not published yet, for a person; an empty string if nothing is."""

    @property
    def on_event(self) -> OnEvent | None:
        """Receives the events."""


_open: WeakKeyDictionary[Unfinished, int] = WeakKeyDictionary()
"""Publishers that nobody has closed, each with the process that opened it: after a fork the child does not have their threads."""

_lock = threading.Lock()
_is_registered = False


def finish_at_exit(publisher: Unfinished) -> None:
    """Publish what `publisher` accepted before the process ends, unless `forget` is called first."""
    global _is_registered
    with _lock:
        _open[publisher] = os.getpid()
        if not _is_registered:
            _is_registered = True
            try:
                threading._register_atexit(finish_all)  # type: ignore[attr-defined]
            except (AttributeError, RuntimeError):  # another Python, or one that is ending already
                atexit.register(finish_all)


def forget(publisher: Unfinished) -> None:
    """`publisher` was closed."""
    with _lock:
        _open.pop(publisher, None)


def finish_all(seconds: float | None = None) -> None:
    """Wait for all publishers that are open in this process, and warn of each that does not finish in time or fails."""
    deadline = time.monotonic() + (EXIT_SECONDS if seconds is None else seconds)
    with _lock:
        mine = [publisher for publisher, process in _open.items() if process == os.getpid()]
    for publisher in mine:
        forget(publisher)
        what = publisher.on_its_way()
        try:
            publisher.flush(max(0.0, deadline - time.monotonic()))
        except BaseException as error:  # also Ctrl-C: nothing may keep the process from ending
            reason = str(error) or type(error).__name__
            warn_lost(what or "a version", reason, publisher.on_event)


def warn_lost(what: str, reason: str, on_event: OnEvent | None) -> None:
    """Warn that something which `publish` accepted is not in the chain."""
    warn(
        VersionsLost,
        f"{what} was accepted by publish(), but is not published: {reason} "
        "Readers still have the version before. Use `with Publisher(...)`, which waits as long as it takes and raises errors.",
        on_event,
        may_raise=False,
        reason=reason,
    )
