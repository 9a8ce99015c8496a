"""Closing a publisher within a time limit, because a call of the store may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from ..chain.version import Version
from ..errors import CloseTimeout
from ..events import OnEvent, emit
from .shortcuts.job_thread import JobThread
from .time_limit import TimeLimit
from .upload.upload_pool import UploadPool


class Closing(TimeLimit):
    """The time that is left to close a publisher (`WriterOptions.close_timeout`). It begins now."""

    def timeout(self, what: str) -> CloseTimeout:
        """Return the error that says what is not published in time."""
        return self._timeout(f"{what} is not published")

    def run(self, work: Callable[[], object], version: str) -> None:
        """Let `work` find out from the store whether a version is in the chain. Raises as it does.

        Raises `CloseTimeout` if it does not return in time. It runs on a thread of its own, which is abandoned then.
        """
        if self.left is None:
            work()
            return
        done: Future[None] = Future()

        def do() -> None:
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=do, name="deltawire-close", daemon=True).start()
        if wait([done], self.left).not_done:
            raise self._timeout(f"it is not known whether {version} is published")
        done.result()

    def _timeout(self, consequence: str) -> CloseTimeout:
        return CloseTimeout(f"the store did not finish within {self.seconds:,g} seconds, so {consequence}.")

    def end_threads(self, jobs: JobThread, pools: Sequence[UploadPool], version: Version | None, on_event: OnEvent | None) -> None:
        """Wait for the skips and anchors that are due, and for all uploads. Abandon those that are not done in time.

        Raises as `JobThread.wait` does, but no TimeoutError.
        """
        try:
            jobs.wait(self.left)
        except TimeoutError:
            jobs.abandon()
            reason = f"the store did not finish within {self.seconds:,g} seconds, and the publisher was closed."
            emit(on_event, "shortcut-failed", kind="skips and anchors", seq=None if version is None else version.seq, reason=reason)
        finally:
            for pool in pools:
                pool.finish(self.left)
