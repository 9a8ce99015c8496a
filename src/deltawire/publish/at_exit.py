"""Before the process ends, what was accepted in the background is published, also if nobody closed the publisher.

Python ends a process in this order: it runs the hooks of `threading._register_atexit`, the last one first; joins threads that are no
daemons; runs the hooks of `atexit`; and stops daemon threads. Thread pools of `concurrent.futures`, which some parts of a publication use,
refuse work from their own hook on, which is of the first kind. So ours must be of the first kind too, and must be registered later than
theirs. Threads that are no daemons may publish after that, so there is a hook of `atexit`, too.

If versions are lost, the process ends with the status 120. Python ignores what hooks raise, and has this status for errors while it cleans
up: it flushes the standard streams last, and takes it if that fails.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # registers its hook, which then runs after ours
import contextlib
import os
import sys
import threading
import time
from typing import Any, Protocol, TextIO, TypeVar, cast
from weakref import WeakKeyDictionary

from ..events import OnEvent
from ..warnings import VersionsLost, warn

EXIT_SECONDS = 120.0
"""How long the end of a process waits for versions that are on their way, for all publishers together."""


_Kept = TypeVar("_Kept")


class Unfinished(Protocol):
    """Something that may have accepted a version that is not in the chain yet."""

    def flush(self, timeout: float | None = None) -> None:
        """Wait for it. Raises what it failed with, or TimeoutError."""

    def unpublished(self) -> str:
        """Say what is not published yet, for a person; an empty string if nothing is."""

    @property
    def on_event(self) -> OnEvent | None:
        """Receives the events."""


class Waitable(Protocol):
    """Something that runs tasks."""

    def wait_until_idle(self, seconds: float) -> None:
        """Return when every task is done, or after so many seconds."""


_open: WeakKeyDictionary[Unfinished, int] = WeakKeyDictionary()
"""Publishers that nobody has closed, each with the process that opened it: after a fork the child does not have their threads."""

_pools: WeakKeyDictionary[Waitable, int] = WeakKeyDictionary()
"""What has threads whose running tasks are waited for, each with the process that opened it."""

_given_up: WeakKeyDictionary[Unfinished, str] = WeakKeyDictionary()
"""Publishers that took too long when the process began to end, and what was not published then."""

_lock = threading.Lock()
_is_registered = False
_has_lost = False
"""Whether the end of this process was told of a version that is not published."""


def finish_at_exit(publisher: Unfinished) -> None:
    """Publish what `publisher` accepted before the process ends, unless `forget` is called first."""
    with _lock:
        _open[publisher] = os.getpid()
    _register()


def wait_at_exit(pool: Waitable) -> None:
    """Wait for the tasks that `pool` runs before the process ends, but no longer than for versions."""
    with _lock:
        _pools[pool] = os.getpid()
    _register()


def forget(publisher: Unfinished) -> None:
    """`publisher` was closed."""
    with _lock:
        _open.pop(publisher, None)


def finish_all(seconds: float | None = None) -> None:
    """Wait for all publishers that are open in this process, and warn of each that does not finish in time or fails."""
    global _has_lost
    deadline = time.monotonic() + (EXIT_SECONDS if seconds is None else seconds)
    for publisher in _of_this_process(_open):
        what = publisher.unpublished()
        try:
            publisher.flush(max(0.0, deadline - time.monotonic()))
        except BaseException as error:  # also Ctrl-C: nothing may keep the process from ending
            _has_lost = True
            if publisher not in _given_up or _given_up[publisher] != what:
                warn_lost(what or "a version", str(error) or type(error).__name__, publisher.on_event)
            if not isinstance(error, Exception) or isinstance(error, TimeoutError):
                _given_up[publisher] = what


def finish_last() -> None:
    """Wait for what threads published after the main thread had ended, and for tasks that still run: a thread must not be stopped there.

    Waits no longer if `finish_all` has waited in vain.
    """
    deadline = time.monotonic() + (0.0 if _given_up else EXIT_SECONDS)
    finish_all(max(0.0, deadline - time.monotonic()))
    for pool in _of_this_process(_pools):
        pool.wait_until_idle(max(0.0, deadline - time.monotonic()))
    if _has_lost and sys.stderr is not None:
        sys.stderr = cast("TextIO", _FailsAtTheEnd(sys.stderr))


class _FailsAtTheEnd:
    """The stream that it wraps, until Python flushes it for the last time: that fails, silently, so the exit status is 120."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("versions were lost")


def _register() -> None:
    global _is_registered
    with _lock:
        if _is_registered:
            return
        _is_registered = True
    atexit.register(finish_last)
    with contextlib.suppress(AttributeError, RuntimeError):  # another Python, or one that is ending already
        threading._register_atexit(finish_all)  # type: ignore[attr-defined]


def _of_this_process(found: WeakKeyDictionary[_Kept, int]) -> list[_Kept]:
    with _lock:
        return [kept for kept, process in found.items() if process == os.getpid()]


def warn_lost(what: str, reason: str, on_event: OnEvent | None, *, raised: BaseException | None = None) -> None:
    """Warn that something which `publish` accepted is not in the chain. `raised` ended the publisher's `with` block, if it was one."""
    if raised is None:
        advice = "Use `with Publisher(...)`, which waits as long as it takes and raises errors."
    else:
        advice = f"This failed while the `with` block was being left because of {type(raised).__name__}, which is raised as well."
    warn(
        VersionsLost,
        f"{what} was accepted by publish(), but is not published: {reason} Readers still have the version before. {advice}",
        on_event,
        may_raise=False,
        reason=reason,
    )
