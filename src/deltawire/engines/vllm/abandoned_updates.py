"""Says why an engine stays paused after an update by vLLM's routes that its program has not ended.

A program that pauses the server without a pause lease (engine_holds.py), for example a trainer that calls the routes with curl, may die
before it resumes the server. Its pause cannot be told from that of an operator, so EngineCore does not end it. But EngineCore notes when
the last request of an update came. If the engine is still paused a minute later, EngineCore looks at its workers, and logs why the engine
stays paused and what to do. The status of the workers says it too (`unended_update`), until the engine continues or the update is
continued. `DELTAWIRE_UPDATE_SECONDS` sets another time than a minute.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from vllm.logger import init_logger

logger = init_logger("vllm.deltawire")

PATIENCE_VARIABLE = "DELTAWIRE_UPDATE_SECONDS"
_PATIENCE = 60.0
_WHOLE = (
    "a program has paused it for an update, and has not resumed it. Its weights are those of version {}, and POST /resume continues "
    "with them"
)
_BROKEN = (
    'a program has begun an update, and has not ended it, and {}. POST {{"method": "deltawire_settle"}} to /collective_rpc, repeat the '
    "update from /start_weight_update on or let a sidecar bring a version, and then POST /resume"
)


class UpdateWatch:
    """Looks at an engine that is still paused some time after the last request of an update.

    Parameters
    ----------
    core
        The EngineCore, on its own thread.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self.reason: str | None = None
        """Why the engine stays paused, and what to do. None before the first look."""
        self.due = 0.0

    def begin(self) -> None:
        """Let the engine look when the time is over."""
        seconds = _patience()
        self.due = time.monotonic() + seconds
        timer = threading.Timer(seconds, self._wake)
        timer.daemon = True
        timer.start()

    def look(self) -> None:
        """Find out why the engine stays paused. Logs it if it is another reason than before, and looks again later."""
        from .engine_holds import stays_paused, why_not

        core = self._core
        if not stays_paused(core):  # it runs, or a pause lease or a new version ends the pause
            core.deltawire_update_watch = None
            return
        problem = why_not(core)
        reason = _WHOLE.format(core.get_weight_version()) if problem is None else _BROKEN.format(problem)
        if reason != self.reason:
            logger.error("deltawire: the server stays paused: %s", reason)
        self.reason = reason
        self.begin()

    def _wake(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        if getattr(self._core, "deltawire_update_watch", None) is self:
            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def note(core: Any) -> None:
    """Note that a request of an update has come.

    Parameters
    ----------
    core
        The EngineCore, on its own thread.
    """
    watch = core.deltawire_update_watch = UpdateWatch(core)
    watch.begin()  # only now, because its timer asks whether it is still the watch of the engine


def forget(core: Any) -> None:
    """Note that nobody has to end an update from now on."""
    core.deltawire_update_watch = None


def look_if_due(core: Any) -> None:
    """Look at the engine if it is time. EngineCore calls it after each request and each wake-up."""
    watch = getattr(core, "deltawire_update_watch", None)
    if watch is not None and time.monotonic() >= watch.due:
        watch.look()


def unended(core: Any) -> str | None:
    """Return why an engine stays paused after an update that nobody has ended, and what to do. None if that is not so."""
    watch = getattr(core, "deltawire_update_watch", None)
    return watch.reason if watch is not None and core.is_scheduler_paused() else None


def _patience() -> float:
    try:
        seconds = float(os.environ.get(PATIENCE_VARIABLE) or _PATIENCE)
    except ValueError:
        return _PATIENCE
    return seconds if 0 <= seconds <= threading.TIMEOUT_MAX else _PATIENCE
