"""Closing a publisher within a time limit, because a call of the store may never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ..chain.version import Version
from ..errors import CloseTimeout
from ..events import OnEvent, emit
from .shortcuts.job_thread import JobThread
from .upload.upload_pool import UploadPool

_LONGEST = threading.TIMEOUT_MAX / 2
"""A longer time, such as infinity, is no limit. Python raises OverflowError if a thread is to wait for so long."""


class Closing:
    """The time that is left to close a publisher. It begins now.

    Parameters
    ----------
    seconds
        The time limit (`WriterOptions.close_timeout`). None or infinity: no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._deadline = None if seconds is None or seconds > _LONGEST else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """The seconds that are left; None if there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def timeout(self, what: str) -> CloseTimeout:
        """Return the error that says what is not published in time."""
        return CloseTimeout(f"the store did not finish within {self._seconds:,g} seconds, so {what} is not published.")

    def end_threads(self, jobs: JobThread, pools: Sequence[UploadPool], version: Version | None, on_event: OnEvent | None) -> None:
        """Wait for the skips and anchors that are due, and for all uploads. Abandon those that are not done in time.

        Raises as `JobThread.wait` does, but no TimeoutError.
        """
        try:
            jobs.wait(self.left)
        except TimeoutError:
            jobs.abandon()
            reason = f"the store did not finish within {self._seconds:,g} seconds, and the publisher was closed."
            emit(on_event, "shortcut-failed", kind="skips and anchors", seq=None if version is None else version.seq, reason=reason)
        finally:
            for pool in pools:
                pool.finish(self.left)
