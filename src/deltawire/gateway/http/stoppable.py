"""Ends work of a task from outside, after a time or when a caller has gone, without another task for the work."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any


class Stoppable:
    """Work of the present task that `stop` ends with an error. Use it as a context around the work.

    Parameters
    ----------
    seconds
        Seconds after which the work ends with `asyncio.TimeoutError`. None waits for ever.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None

    def stop(self, error: BaseException) -> None:
        """End the work with an error, unless it has ended. Call it from the event loop of the task, and not from the work itself."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> Stoppable:
        self._task = asyncio.current_task()
        if self._seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self.stop, asyncio.TimeoutError())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        task, self._task = self._task, None
        if self._timer is not None:
            self._timer.cancel()
        if self._error is None or task is None:
            return
        others = task.uncancel() if hasattr(task, "uncancel") else 0  # from Python 3.11 on, tasks count who cancels them
        if kind is asyncio.CancelledError and not others:
            raise self._error from None
