"""Publish accepted versions before the process ends, even if the publisher was never closed.

Python ends a process in this order: it runs the hooks of `threading._register_atexit`, the last one first; it joins threads that are not
daemons; it runs the hooks of `atexit`; it stops daemon threads. Some steps of a publication use thread pools of `concurrent.futures`.
These refuse work once their own hook has run, which is of the first kind. So our hook must be of the first kind, too, and must be
registered after theirs. Threads that are not daemons may publish after that, so there is also a hook of `atexit`.

If versions are lost, the process ends with the status 120. Python ignores errors in hooks, but uses this status if it cannot flush the
standard streams, which it does last.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # registers its hook, so that ours runs before it
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
"""How long the end of a process waits for unpublished versions, for all publishers together."""


_Kept = TypeVar("_Kept")


class Unfinished(Protocol):
    """Something that may have accepted a version that is not in the chain yet."""

    def flush(self, timeout: float | None = None) -> None:
        """Wait until it is published. Raises its error, or TimeoutError."""

    def unpublished(self) -> str:
        """Name what is not published yet. Returns an empty string if everything is."""

    @property
    def on_event(self) -> OnEvent | None:
        """The receiver of events."""


class Waitable(Protocol):
    """Something that runs tasks on its own threads."""

    def wait_until_idle(self, seconds: float) -> None:
        """Return when every task is done, or after this many seconds."""


_open: WeakKeyDictionary[Unfinished, int] = WeakKeyDictionary()
"""Open publishers, each with the process that opened it. After a fork the child process does not have their threads."""

_pools: WeakKeyDictionary[Waitable, int] = WeakKeyDictionary()
"""Pools whose running tasks the end of the process waits for, each with the process that opened it."""

_given_up: WeakKeyDictionary[Unfinished, str] = WeakKeyDictionary()
"""Publishers that took too long when the process began to end, with the names of what they did not publish."""

_lock = threading.Lock()
_is_registered = False
_has_lost = False
"""Whether a version was lost at the end of this process."""


def finish_at_exit(publisher: Unfinished) -> None:
    """Let the end of the process wait until `publisher` has published everything, unless `forget` is called first."""
    with _lock:
        _open[publisher] = os.getpid()
    _register()


def wait_at_exit(pool: Waitable) -> None:
    """Let the end of the process wait for the running tasks of `pool`, but no longer than for versions."""
    with _lock:
        _pools[pool] = os.getpid()
    _register()


def forget(publisher: Unfinished) -> None:
    """Stop waiting for `publisher`, because it was closed."""
    with _lock:
        _open.pop(publisher, None)


def finish_all(seconds: float | None = None) -> None:
    """Wait for all open publishers of this process, and warn of each that fails or does not finish in time."""
    global _has_lost
    deadline = time.monotonic() + (EXIT_SECONDS if seconds is None else seconds)
    for publisher in _of_this_process(_open):
        what = publisher.unpublished()
        try:
            publisher.flush(max(0.0, deadline - time.monotonic()))
        except BaseException as error:  # including Ctrl-C, because nothing may keep the process from ending
            _has_lost = True
            if publisher not in _given_up or _given_up[publisher] != what:
                warn_lost(what or "a version", str(error) or type(error).__name__, publisher.on_event)
            if not isinstance(error, Exception) or isinstance(error, TimeoutError):
                _given_up[publisher] = what


def finish_last() -> None:
    """Wait for versions that threads published after the main thread had ended, and for running tasks, which must not be stopped.

    It does not wait if `finish_all` has already given up on a publisher.
    """
    deadline = time.monotonic() + (0.0 if _given_up else EXIT_SECONDS)
    finish_all(max(0.0, deadline - time.monotonic()))
    for pool in _of_this_process(_pools):
        pool.wait_until_idle(max(0.0, deadline - time.monotonic()))
    if _has_lost:
        sys.stderr = cast("TextIO", _FailsAtTheEnd(sys.stderr))


class _FailsAtTheEnd:
    """Wraps a stream. The last flush, when Python ends, fails silently, which makes the exit status 120.

    The stream may be None or closed: the exit status is the same.
    """

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None and not self._stream.closed:
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
    with contextlib.suppress(AttributeError, RuntimeError):  # another Python implementation, or Python is ending already
        threading._register_atexit(finish_all)  # type: ignore[attr-defined]


def _of_this_process(found: WeakKeyDictionary[_Kept, int]) -> list[_Kept]:
    with _lock:
        return [kept for kept, process in found.items() if process == os.getpid()]


def warn_lost(what: str, reason: str, on_event: OnEvent | None, *, raised: BaseException | None = None) -> None:
    """Warn that a version which `publish` accepted is not in the chain. `raised` is the error that ended the `with` block, if any."""
    if raised is None:
        advice = "Use `with Publisher(...)`, which waits longer (WriterOptions.close_timeout) and raises errors."
    else:
        advice = f"This failed while the `with` block was being left because of {type(raised).__name__}, which is raised as well."
    warn(
        VersionsLost,
        f"{what} was accepted by publish(), but is not published: {reason} Readers still have the version before. {advice}",
        on_event,
        may_raise=False,
        reason=reason,
    )
