"""Ends commands that run until a signal arrives, or until nothing reads their output, even if something hangs."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_CLOSED = (errno.EIO, errno.EPIPE, errno.EBADF, errno.ENXIO)
"""The errors of writing to a closed terminal, or to a pipe without a reader."""

_LONGEST_WAIT = 0.5
"""Seconds after which a waiting main thread handles a signal that came just before it began to wait."""


class Ending:
    """Ends this process at most this long after the first SIGINT, SIGTERM or SIGHUP, whatever it waits for.

    >>> with Ending(30) as ending:
    ...     serve(on_event=ending.with_output(print_event))

    The installed handlers still run first, and usually end the process by raising an exception. That exception can arrive between taking a
    lock and the code that releases it, and then a thread that waits for the lock never ends. In that case a timer of the operating system
    ends the process. The timer is not cancelled when the block ends, because Python waits for threads afterwards.

    Parameters
    ----------
    seconds
        The time between the first signal and the end of the process.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._is_timed = False
        self._lock = threading.Lock()
        self._is_output_closed = False

    def __enter__(self) -> Ending:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)):
                handler = signal.getsignal(number)
                if callable(handler):  # `nohup` ignores SIGHUP, and so do we
                    self._before[number] = handler
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def with_output(self, call: Callable[P, object]) -> Callable[P, None]:
        """Return a function that calls `call`, and ends this process as SIGTERM does when its output is closed.

        The function may be called on any thread. It raises all other errors.
        """

        @wraps(call)
        def printing(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                call(*args, **kwargs)
            except OSError as error:
                if error.errno not in _CLOSED:
                    raise
                self._end_once()
            except SystemExit:  # rich raises this for a pipe without a reader
                self._end_once()

        return printing

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_timed and hasattr(signal, "setitimer"):
            self._is_timed = True
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._seconds)
        self._before[number](number, frame)

    def _end_once(self) -> None:
        with self._lock:
            is_first, self._is_output_closed = not self._is_output_closed, True
        main = threading.main_thread().ident
        if is_first and main is not None:
            signal.pthread_kill(main, signal.SIGTERM)


def on_another_thread(call: Callable[[], T]) -> T:
    """Run `call` on another thread, and return its result or raise its error.

    A signal then interrupts only the wait, not code that holds a lock.

    Python runs signal handlers only between two instructions of the main thread. A signal that comes just before a wait begins would be
    handled after the wait, so the wait is cut into short ones.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="deltawire-call", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LONGEST_WAIT)
    if errors:
        raise errors[0]
    return results[0]
