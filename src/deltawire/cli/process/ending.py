"""How commands end that run until somebody ends them: always, on a signal, or when nobody can read their output any more."""

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
_GONE = (errno.EIO, errno.EPIPE, errno.EBADF, errno.ENXIO)
"""Errors of writing to a terminal that was closed, or to a pipe that nobody reads."""

_LONGEST_WAIT = 0.5
"""Seconds after which a waiting main thread handles a signal that came just before it began to wait."""


class Ending:
    """Ends this process within `seconds` of the first SIGINT, SIGTERM or SIGHUP, whatever it waits for.

    >>> with Ending(30) as ending:
    ...     serve(on_event=ending.with_output(print_event))

    The handlers that are installed still run first, and usually end the process. They raise an exception, though, which can come between
    taking a lock and the code that releases it; what waits for that lock then never ends. The system's own timer ends the process then.
    The timer is not cancelled when the block ends, because threads are waited for after it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._is_timed = False
        self._lock = threading.Lock()
        self._output_is_gone = False

    def __enter__(self) -> Ending:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)):
                handler = signal.getsignal(number)
                if callable(handler):  # `nohup` ignores SIGHUP; so do we then
                    self._before[number] = handler
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def with_output(self, call: Callable[P, object]) -> Callable[P, None]:
        """Return a function that prints by `call`, and asks this process to end, as SIGTERM does, when the output is gone.

        May be called on any thread. Other errors are raised.
        """

        @wraps(call)
        def printing(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                call(*args, **kwargs)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                self._end_once()
            except SystemExit:  # what rich makes of a pipe that nobody reads
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
            is_first, self._output_is_gone = not self._output_is_gone, True
        main = threading.main_thread().ident
        if is_first and main is not None:
            signal.pthread_kill(main, signal.SIGTERM)


def on_another_thread(call: Callable[[], T]) -> T:
    """Return what `call` returns, or raise what it raises. A signal interrupts only the wait, and no locks that `call` has taken.

    Python runs signal handlers only between two instructions of the main thread. A signal that comes just before a wait begins would be
    handled after the wait, so the wait is cut into short pieces.
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
