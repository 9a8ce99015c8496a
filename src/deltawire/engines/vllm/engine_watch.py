"""EngineCore looks by itself after workers that have not confirmed a swap yet, and quarantines an engine whose weights are wrong.

**Late confirmation.** With `confirm="written"`, or with more weights than a swap can digest in a short time, workers digest their weights
in the background after the swap. EngineCore asks them until all have finished. If one of them finds wrong weights, EngineCore quarantines
the engine at once. No other program has to look.

**Quarantine.** Requests that run are ended, because their last tokens were made by wrong weights. New requests wait. The label of the
weights says that they are in an unknown state, and the workers accept only an update that loads everything. Clients quarantine an engine
with `deltawire_quarantine`, for example after a check of its results has failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.logger import init_logger

from . import QUARANTINED_LABEL

logger = init_logger("vllm.deltawire")

UNCONFIRMED = "unconfirmed"
"""The field of a worker's status that says whether it still has to confirm its last swap."""
WRONG = "its weights are in an unknown state, because a worker found wrong weights after a swap"
_FIRST_LOOK, _LONGEST_WAIT = 0.05, 1.0
"""Seconds until the first look at the workers. Each further wait is twice as long, up to the second number."""


class ConfirmationWatch:
    """Looks after the workers of an engine until all have confirmed the last swap.

    Parameters
    ----------
    core
        The EngineCore.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._wait = _FIRST_LOOK
        self.due = 0.0
        self._schedule()

    def look(self) -> None:
        """Ask the workers. Quarantines the engine if one of them has wrong weights. Call it on the thread of EngineCore."""
        workers = self._core.model_executor.collective_rpc("deltawire_status")
        if any(worker["quarantined"] for worker in workers):
            errors = [f"worker {rank}: {worker['error']}" for rank, worker in enumerate(workers) if worker.get("error")]
            quarantine(self._core, "; ".join([WRONG, *errors]))
        elif is_unconfirmed(workers):
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
            self._schedule()
        else:
            self._core.deltawire_watch = None

    def _schedule(self) -> None:
        self.due = time.monotonic() + self._wait
        timer = threading.Timer(self._wait, self._wake)
        timer.daemon = True
        timer.start()

    def _wake(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        if getattr(self._core, "deltawire_watch", None) is self:
            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def is_unconfirmed(workers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a worker still has to confirm its last swap.

    Parameters
    ----------
    workers
        The status of each worker.
    """
    return any(worker.get(UNCONFIRMED) for worker in workers)


def begin(core: Any) -> None:
    """Look after the workers from now on, until all have confirmed the last swap.

    Parameters
    ----------
    core
        The EngineCore, on its own thread.
    """
    core.deltawire_watch = ConfirmationWatch(core)


def look_if_due(core: Any) -> None:
    """Look at the workers if it is time. EngineCore calls it after each request and each wake-up."""
    watch = getattr(core, "deltawire_watch", None)
    if watch is not None and time.monotonic() >= watch.due:
        watch.look()


def quarantine(core: Any, reason: str) -> list[Any]:
    """End the requests that run, start no others, and let the workers accept only an update that loads everything. Returns their status.

    Engines that work in step with others (data parallelism) are not paused, because one of them cannot pause alone. The client must pause
    all of them.

    Parameters
    ----------
    core
        The EngineCore, on its own thread.
    reason
        Why the weights, or the results that they give, are wrong.
    """
    from .engine_holds import is_alone, stays_paused

    logger.error("deltawire: the server stays paused: %s", reason)
    core.deltawire_watch = None
    core.set_weight_version(QUARANTINED_LABEL)
    if is_alone(core):
        by_others = stays_paused(core)
        core.pause_scheduler("abort", True)
        core.deltawire_hold, core.deltawire_paused_by_others = reason, by_others
    workers: list[Any] = core.model_executor.collective_rpc("deltawire_quarantine", None, (reason,))
    return workers
