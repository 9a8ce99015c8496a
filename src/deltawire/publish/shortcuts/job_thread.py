"""The thread that makes shortcuts while newer versions are published."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable

from ..at_exit import wait_at_exit

Job = Callable[[], None]

_NICENESS = 5
"""The niceness that is added to that of the thread. A thread of the caller gets three times as much of a processor that both want."""


class JobThread:
    """A thread that does one job after the other. It logs the error of a job that fails, and continues with the next.

    An error that is no `Exception`, such as `SystemExit` from a listener, is also raised once, by the next `wait` or `close`.

    On Linux, jobs have a lower priority than other threads, so that the next version, or training, takes little longer because of them.

    The thread starts with the first job. It does not keep the process from ending, but the end of the process waits for jobs that run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._is_working = False
        self._closing = self._abandoned = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        """The first error that is no `Exception`, until it is raised."""
        wait_at_exit(self)

    def do(self, job: Job) -> None:
        """Add a job to the queue."""
        with self._changed:
            if self._abandoned:
                return
            self._jobs.append(job)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all jobs are done. Raises TimeoutError, or once an error of a job that is no `Exception`."""
        with self._changed:
            if not self._changed.wait_for(self._is_idle, timeout):
                raise TimeoutError(f"skips and anchors are still being made after {timeout:.3g} seconds.")
        self._raise_error()

    def wait_until_idle(self, seconds: float) -> None:
        """Return when all jobs are done, or after this many seconds."""
        with self._changed:
            self._changed.wait_for(self._is_idle, seconds)

    def abandon(self) -> None:
        """End the thread after the job that runs now, and do not wait for it. The result of that job does not count, and is not logged."""
        with self._changed:
            self._closing = self._abandoned = True
            self._jobs.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all jobs are done, and end the thread. Raises an error that is no `Exception`, if `wait` has not raised it.

        After `abandon` it neither waits nor raises.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None and not self._abandoned:
            self._thread.join()
            self._raise_error()

    def _raise_error(self) -> None:
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _is_idle(self) -> bool:
        return self._abandoned or not (self._jobs or self._is_working)

    def _run(self) -> None:
        _lower_priority()
        while True:
            with self._changed:
                self._is_working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._is_working = True
            try:
                job()
            except BaseException as error:
                if self._abandoned:
                    return
                logging.getLogger("deltawire").exception("a job of %s failed", self._name)
                if not isinstance(error, Exception):
                    with self._changed:
                        self._error = self._error or error
            del job  # it holds the baseline


def _lower_priority() -> None:
    """Let other threads go first. Threads that this thread starts, such as those of the codec, have the same priority."""
    if sys.platform != "linux":
        return  # elsewhere, this would change the priority of the whole process
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # not allowed by a sandbox
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
