"""Reasons for which EngineCore stays paused, and the watchdog that ends a pause that nobody ends.

**Holds.** The engine is held while its weights are those of no version: before its first version, if the server was started with
`DELTAWIRE_HOLD=1`; after a swap that failed; and, with `DELTAWIRE_HOLD=1`, after a sleep that has discarded the weights. Requests wait.
The next swap that is made ends the hold, and so does `/resume`. Nothing else does: an engine that sleeps and wakes up is held as before.
A request to pause the engine when its requests have ended ("wait") freezes them instead, because no weights may finish them. The status of
the workers says why the engine is held (`held`).

**Pause lease.** A program that swaps by vLLM's routes pauses the server, and may die before it resumes the server. It therefore asks for
a pause lease first (`deltawire_lease`). If the pause lasts longer than the pause lease, the engine looks at its workers. It continues if
all of them have the version that the label of the weights says. Otherwise it logs why not, and looks again later. A pause without a pause
lease is left alone. Requests that are finished first ("wait") may take longer than the pause lease: it is extended until they have ended.

**Pauses of others.** The engine notes who has paused it. A pause without a pause lease is that of an operator, or of a program of its own.
Only `/resume` ends it, not a swap, nor a pause lease that begins meanwhile. The status of the workers says so (`paused_by_others`).
abandoned_updates.py tells what happens if such a program begins an update and dies.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from . import QUARANTINED_LABEL, abandoned_updates, engine_watch, lost_wakeups

logger = init_logger("vllm.deltawire")

HOLD_VARIABLE = "DELTAWIRE_HOLD"
FIRST, FAILED, SLEPT = (
    "it waits for its first version",
    "its weights are in an unknown state, because a swap failed",
    "its weights were discarded while it was asleep",
)
"""Reasons for a hold."""

LOOK_AGAIN_SECONDS = 60.0
"""Seconds between two looks at an engine whose pause lease is over and that cannot continue."""


def held(core: Any) -> str | None:
    """Return why an engine is held, or None."""
    reason: str | None = getattr(core, "deltawire_hold", None)
    return reason if reason is not None and core.is_scheduler_paused() else None


def hold(core: Any, reason: str) -> None:
    """Run no requests until a swap is made.

    Parameters
    ----------
    core
        The EngineCore, on its own thread.
    reason
        Why.
    """
    from vllm.v1.core.sched.interface import PauseState

    core.deltawire_hold = reason
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)


def stays_paused(core: Any) -> bool:
    """Return whether an engine is paused by somebody who had no pause lease, so that only `/resume` may end the pause."""
    return bool(getattr(core, "deltawire_paused_by_others", False) and core.is_scheduler_paused())


def has_pause_lease(core: Any) -> bool:
    """Return whether a program has a pause lease, and will resume the engine itself if it has paused it."""
    pause_lease = getattr(core, "deltawire_lease", None)
    return pause_lease is not None and not pause_lease.is_lost


def end_pause(core: Any) -> bool:
    """Forget why an engine was held, because it has a version now. Returns whether it continues, if it was paused before."""
    is_over = held(core) is not None or has_pause_lease(core)
    core.deltawire_hold = None
    return is_over and not stays_paused(core)


def install(core_class: Any, loop_class: Any) -> bool:
    """Let engines be held and watched. Returns False, and changes nothing, if this vLLM does not have what is needed.

    Parameters
    ----------
    core_class
        vLLM's class `EngineCore`.
    loop_class
        vLLM's class `EngineCoreProc`.
    """
    needed = ("sleep", "wake_up", "pause_scheduler", "resume_scheduler", "is_scheduler_paused", "set_weight_version")
    if not all(hasattr(core_class, name) for name in needed) or not hasattr(loop_class, "_handle_client_request"):
        return False
    if getattr(core_class.resume_scheduler, "ends_holds", False):
        return True
    sleep, wake_up, resume = core_class.sleep, core_class.wake_up, core_class.resume_scheduler
    run_loop, handle = loop_class.run_busy_loop, loop_class._handle_client_request

    @functools.wraps(sleep)
    def sleep_and_forget(core: Any, level: int = 1, *arguments: Any, **options: Any) -> Any:
        if uses_backend(core):
            _prepare_sleep(core)
        return sleep(core, level, *arguments, **options)

    @functools.wraps(wake_up)
    def wake_up_held(core: Any, *arguments: Any, **options: Any) -> Any:
        reason = getattr(core, "deltawire_hold", None)
        is_awake = wake_up(core, *arguments, **options)  # this resumes the scheduler
        if is_awake and reason is not None and (reason != SLEPT or _wants_hold()):
            hold(core, reason)
        return is_awake

    @functools.wraps(resume)
    def resume_unheld(core: Any) -> Any:
        core.deltawire_hold = core.deltawire_lease = None
        core.deltawire_paused_by_others = False
        abandoned_updates.forget(core)
        return resume(core)

    @functools.wraps(run_loop)
    def run_held(core: Any, *arguments: Any, **options: Any) -> Any:
        if uses_backend(core):
            lost_wakeups.look_often()
        if _wants_hold() and uses_backend(core):
            if is_alone(core):
                hold(core, FIRST)
            else:
                logger.warning("deltawire: %s is ignored, because several engines work together", HOLD_VARIABLE)
        return run_loop(core, *arguments, **options)

    @functools.wraps(handle)
    def handle_and_look(core: Any, *arguments: Any) -> Any:
        result = handle(core, *arguments)
        pause_lease = getattr(core, "deltawire_lease", None)
        if pause_lease is not None and pause_lease.is_over:
            look(core, pause_lease)
        engine_watch.look_if_due(core)
        abandoned_updates.look_if_due(core)
        return result

    for engine_class in {core_class, loop_class}:
        if "pause_scheduler" in vars(engine_class):
            engine_class.pause_scheduler = _pause_of(engine_class.pause_scheduler)
    resume_unheld.ends_holds = True  # type: ignore[attr-defined]
    core_class.sleep, core_class.wake_up, core_class.resume_scheduler = sleep_and_forget, wake_up_held, resume_unheld
    loop_class.run_busy_loop, loop_class._handle_client_request = run_held, handle_and_look
    return True


def _pause_of(pause: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method to pause an engine in place of vLLM's. It notes who pauses, and an engine that is held finishes no requests first."""

    @functools.wraps(pause)  # vLLM converts arguments by the signature
    def pause_held(core: Any, mode: str = "abort", clear_cache: bool = True) -> Any:
        _note_pause(core)
        if mode == "wait" and held(core) is not None:
            mode = "keep"
        return pause(core, mode, clear_cache)

    return pause_held


def _note_pause(core: Any) -> None:
    """Note whether somebody pauses an engine who has no pause lease."""
    pause_lease = getattr(core, "deltawire_lease", None)
    if pause_lease is not None and (pause_lease.is_lost or (pause_lease.is_over and not core.is_scheduler_paused())):
        pause_lease = core.deltawire_lease = None
    if pause_lease is None:
        core.deltawire_paused_by_others = True


class PauseLease:
    """A program that has paused the engine promises to resume it until the deadline. Then a timer wakes the engine up.

    Parameters
    ----------
    core
        The EngineCore.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self.deadline = 0.0
        self.is_lost = False
        """True if the engine has continued by itself, so that the program must stop writing."""

    @property
    def is_over(self) -> bool:
        """True after the deadline."""
        return time.monotonic() >= self.deadline

    def extend(self, seconds: float) -> None:
        """Let the pause last this many seconds from now."""
        self.deadline = time.monotonic() + seconds
        timer = threading.Timer(seconds, self._wake)
        timer.daemon = True
        timer.start()

    def _wake(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        if getattr(self._core, "deltawire_lease", None) is self:
            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def grant_pause_lease(core: Any, seconds: float) -> None:
    """Begin a pause lease. The program asks for it just before it pauses the engine. Raises `ValueError` if it cannot be that long.

    Parameters
    ----------
    core
        The EngineCore, on its own thread.
    seconds
        How long the pause may last.
    """
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise ValueError(f"a pause lease lasts at least 0 and at most {threading.TIMEOUT_MAX:.0f} seconds, not {seconds}")
    core.deltawire_lease = PauseLease(core)
    core.deltawire_lease.extend(seconds)


def check_writable(core: Any) -> None:
    """Raise an error if the workers must not write now, because the engine runs or has no weights in its memory.

    Tokens would get the label of other weights than those that made them.
    """
    pause_lease = getattr(core, "deltawire_lease", None)
    if pause_lease is not None and pause_lease.is_lost:
        raise RuntimeError("the pause lasted longer than the pause lease, so the engine has continued: pause it again")
    if "weights" in getattr(core.model_executor, "sleeping_tags", ()):
        raise RuntimeError("the server is asleep, so its weights cannot be changed: wake it up first")
    if not core.is_scheduler_paused():
        raise RuntimeError("the engine is not paused, so its weights cannot be changed: pause it first")


def hold_if_quarantined(core: Any) -> None:
    """Hold an engine whose workers have failed to write an update by vLLM's routes, unless several engines work together."""
    if is_alone(core) and any(worker["quarantined"] for worker in core.model_executor.collective_rpc("deltawire_status")):
        hold(core, FAILED)


def look(core: Any, pause_lease: PauseLease) -> None:
    """Continue after a pause that lasted too long, if the weights are those of the version that their label says. Otherwise log why not."""
    if pause_lease.is_lost or not core.is_scheduler_paused():
        return
    if stays_paused(core):
        core.deltawire_lease = None
        return
    if _finishes_requests(core):
        pause_lease.extend(LOOK_AGAIN_SECONDS)
        return
    reason = why_not(core)
    if reason is None:
        logger.warning("deltawire: the server was paused for too long, so it continues with version %s", core.get_weight_version())
        core.resume_scheduler()
        pause_lease.is_lost = True
        core.deltawire_lease = pause_lease  # resuming has forgotten it, but the program may still come back
        return
    logger.error("deltawire: the server stays paused: %s", reason)
    pause_lease.extend(LOOK_AGAIN_SECONDS)


def _finishes_requests(core: Any) -> bool:
    """Return whether requests still run in an engine that starts no new ones."""
    from vllm.v1.core.sched.interface import PauseState

    return bool(core.scheduler.pause_state == PauseState.PAUSED_NEW and core.scheduler.has_unfinished_requests())


def is_alone(core: Any) -> bool:
    """Return whether an engine works alone. Engines with data parallelism pause and continue together."""
    return core.vllm_config.parallel_config.data_parallel_size == 1 and not getattr(core, "has_coordinator", False)


def why_not(core: Any) -> str | None:
    """Return why an engine cannot continue. None if its weights are those of the version that their label says."""
    if not is_alone(core):
        return "several engines work together, and only /resume continues all of them"
    if (reason := held(core)) is not None:
        return reason
    if core.model_executor.is_sleeping:
        return "it is asleep"
    try:
        workers = core.model_executor.collective_rpc("deltawire_status")
    except Exception as error:
        return f"its workers do not answer: {error}"
    if any(worker["quarantined"] for worker in workers):
        return "its weights are in an unknown state"
    versions, label = {worker["seq"] for worker in workers}, core.get_weight_version()
    if len(versions) != 1:
        return f"its workers have different versions: {sorted(map(str, versions))}"
    (seq,) = versions
    if label not in (str(seq), "default" if seq is None else ""):
        return f"its workers have version {seq}, but its weights have the label {label!r}"
    return None


def uses_backend(core: Any) -> bool:
    """Return whether the workers of an engine have our backend."""
    from .plugin import BACKEND

    config = getattr(core.vllm_config, "weight_transfer_config", None)
    return config is not None and config.backend == BACKEND


def _wants_hold() -> bool:
    return os.environ.get(HOLD_VARIABLE, "") not in ("", "0")


def forget(core: Any) -> None:
    """Let the workers forget their version, because other code writes to their weights now. The label says so, too.

    Parameters
    ----------
    core
        The EngineCore, on its own thread.
    """
    core.model_executor.collective_rpc(_forget)
    core.set_weight_version(QUARANTINED_LABEL)


def _prepare_sleep(core: Any) -> None:
    """Let the workers stop reading their memory, and forget weights that are discarded, at the moment when the engine falls asleep.

    If it waits for its requests first, updates can still be staged and made meanwhile.
    """
    executor = core.model_executor
    if "sleep" in vars(executor):
        return
    sleep = executor.sleep

    def sleep_now(level: int = 1) -> Any:
        if level >= 2:
            forget(core)
            core.deltawire_hold = getattr(core, "deltawire_hold", None) or SLEPT
        else:
            executor.collective_rpc(_stop_staging)
        return sleep(level)

    executor.sleep = sleep_now


def _stop_staging(worker: Any) -> None:
    """Stop a worker from reading its memory until `stage` is called again. vLLM sends this function to the workers by its name."""
    worker.weight_transfer_engine.stop_staging()


def _forget(worker: Any) -> None:
    """Let a worker forget its version. vLLM sends this function to the workers by its name."""
    forget = getattr(worker.weight_transfer_engine, "forget", None) or worker.weight_transfer_engine.shutdown
    forget()
