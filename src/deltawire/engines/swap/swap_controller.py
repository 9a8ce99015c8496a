"""The state machine of a swap: pause, apply, confirm, resume, and what happens when one of these steps fails."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

from ...chain.version import Version
from ...errors import DeltawireError, EngineAsleep, EngineQuarantined, EngineRefused, EngineUnavailable, SwapFailed
from ...events import OnEvent, Value, emit
from ...subscribe.prepared_swap import PreparedSwap
from ...telemetry.trace_context import traced
from ..base import KvCache
from .live_intervals import LiveIntervals


class Pausable(Protocol):
    """The part of an engine that a swap needs. `Engine` documents the methods."""

    name: str

    def pause(self, kv_cache: KvCache) -> None: ...

    def resume(self) -> None: ...


class SwapState(enum.Enum):
    """The present state of an engine."""

    SERVING = "serving"
    """It generates with the weights of one version."""
    PAUSED = "paused"
    """A swap is in progress."""
    HALTED = "halted"
    """It has the weights of one version, but is paused because it did not resume."""
    QUARANTINED = "quarantined"
    """It stays paused because its weights are in an unknown state. Only a swap to a full checkpoint can repair it."""


@dataclass(frozen=True, slots=True)
class SwapRecord:
    """The duration of one swap.

    Parameters
    ----------
    version
        The version that the engine got.
    wait_seconds
        Time that the engine took to pause.
    apply_seconds
        Time for writing the new weights.
    confirm_seconds
        Time for checking them.
    pause_seconds
        Time that the engine was paused in all.
    full_scan
        True if every weight was read to confirm the swap.
    """

    version: Version
    wait_seconds: float
    apply_seconds: float
    confirm_seconds: float
    pause_seconds: float
    full_scan: bool


class SwapController:
    """Brings an engine from one version to the next, or back to the old one, or quarantines it.

    Each call of `swap`, `ensure_running` and `quarantine` makes one of these transitions. "revert" means that the change was reverted.

    | from        | call           | what happens                                  | to          | raises            |
    |-------------|----------------|-----------------------------------------------|-------------|-------------------|
    | serving     | swap           | pause, apply, confirm, resume                 | serving     |                   |
    | serving     | swap           | pause, apply, confirm; resume fails           | halted      |                   |
    | serving     | swap           | pause, apply, confirm; Ctrl-C in resume       | halted      |                   |
    | serving     | swap           | pause fails; resume                           | serving     | EngineUnavailable |
    | serving     | swap           | pause fails; resume fails                     | halted      | EngineUnavailable |
    | serving     | swap           | apply or confirm fails; revert, resume        | serving     | SwapFailed        |
    | serving     | swap           | apply or confirm fails; revert; resume fails  | halted      | SwapFailed        |
    | serving     | swap           | apply or confirm fails; revert fails          | quarantined | EngineQuarantined |
    | halted      | swap           | the same as from serving                      |             |                   |
    | halted      | ensure_running | resume                                        | serving     |                   |
    | halted      | ensure_running | resume fails                                  | halted      | EngineUnavailable |
    | halted      | ensure_running | resume, if Ctrl-C interrupted it before       | serving     | KeyboardInterrupt |
    | quarantined | swap           | pause, apply, confirm in full, resume         | serving     |                   |
    | quarantined | swap           | pause, apply, confirm in full; resume fails   | halted      |                   |
    | quarantined | swap           | pause fails                                   | quarantined | EngineUnavailable |
    | quarantined | swap           | apply or confirm fails, whatever revert does  | quarantined | EngineQuarantined |
    | quarantined | ensure_running | nothing                                       | quarantined |                   |
    | serving     | ensure_running | nothing                                       | serving     |                   |
    | any         | quarantine     | nothing: the caller has paused the engine     | quarantined |                   |

    While a swap from serving or halted runs, the state is paused. An engine that refuses an update without changing anything raises
    `EngineRefused` in `apply`, and one that is asleep `EngineAsleep`. These are reverted like other failures, and then raised in place of
    `SwapFailed`. If Ctrl-C interrupts a step
    before `resume`, the swap is reverted and `KeyboardInterrupt` is raised in place of `SwapFailed`. If it interrupts `resume`, the swap
    was made, so `swap` returns. The next `ensure_running` resumes the engine and raises `KeyboardInterrupt`.

    Events: `swapped`; `repaired` if the engine was quarantined before; `swap-failed`; `resume-failed`; `engine-quarantined`.

    Parameters
    ----------
    engine
        The engine to pause and resume.
    kv_cache
        What happens to keys and values that the old weights computed.
    confirm_every
        Every `confirm_every`-th swap is confirmed by reading all weights. The first swap is one of them.
    intervals
        Records which version is live from when to when.
    details
        Returns further fields for the event `swapped`, or other values for its fields. It is called after the engine was resumed.
    on_event
        Called with each event.
    """

    def __init__(
        self,
        engine: Pausable,
        *,
        kv_cache: KvCache,
        confirm_every: int = 1,
        intervals: LiveIntervals | None = None,
        details: Callable[[SwapRecord], Mapping[str, Value]] = lambda record: {},
        on_event: OnEvent | None = None,
    ) -> None:
        if confirm_every < 1:
            raise ValueError(f"confirm_every must be at least 1, not {confirm_every}")
        self._engine = engine
        self._kv_cache = kv_cache
        self._confirm_every = confirm_every
        self._intervals = intervals or LiveIntervals()
        self._details = details
        self._on_event = on_event
        self._count = 0
        self._resume_error: BaseException | None = None
        self._interruption: BaseException | None = None
        """The Ctrl-C that interrupted `resume`, until `ensure_running` raises it."""
        self.state = SwapState.SERVING
        self.last: SwapRecord | None = None
        """The last successful swap."""
        self.last_error: BaseException | None = None
        """Why the last swap failed. None if it succeeded."""

    def swap(self, prepared: PreparedSwap, version: Version) -> None:
        """Make a prepared change, which leads to `version`. See the table of transitions, and `prepared_swap.Swap`."""
        try:
            self._swap(prepared, version)
        except BaseException as error:
            self.last_error = error
            raise
        self.last_error = None

    def ensure_running(self) -> None:
        """Resume an engine that did not resume after its last swap. Raises `EngineUnavailable` if it still does not."""
        if self.state is SwapState.HALTED:
            self._resume(self._intervals.latest)
        interruption, self._interruption = self._interruption, None
        if interruption is not None:
            raise interruption
        if self.state is SwapState.HALTED and (error := self._resume_error) is not None:
            if isinstance(error, EngineUnavailable):
                raise error
            raise EngineUnavailable(f"{self._engine.name} is paused and does not resume: {error}") from error

    def quarantine(self, version: Version, reason: str) -> EngineQuarantined:
        """Note that the weights of an engine are wrong, although its last swap was made. Returns the error to raise.

        Parameters
        ----------
        version
            The version that the engine was taken to have.
        reason
            What is wrong.
        """
        self._intervals.end()
        error = self._quarantine(reason, version)
        self.last_error = error
        return error

    def assume(self, state: SwapState) -> None:
        """Set the state that the engine was found in, for an engine that other processes may restart, pause or change."""
        self.state = state

    def _swap(self, prepared: PreparedSwap, version: Version) -> None:
        is_repair = self.state is SwapState.QUARANTINED
        full = is_repair or self._count % self._confirm_every == 0
        clock = self._intervals.clock
        served = self._intervals.latest
        asked = clock()
        self._pause()
        paused = clock()
        try:
            prepared.apply()
            applied = clock()
            prepared.confirm(full=full)
        except BaseException as error:
            self._handle_failure(prepared, error, served, version)
        confirmed = clock()
        self._count += 1
        self._resume(version)
        self.last = SwapRecord(version, paused - asked, applied - paused, confirmed - applied, clock() - paused, full)
        if is_repair:
            self._emit("repaired", version)
        fields: dict[str, Value] = {
            "step": version.step,
            "wait_seconds": self.last.wait_seconds,
            "apply_seconds": self.last.apply_seconds,
            "confirm_seconds": self.last.confirm_seconds,
            "pause_seconds": self.last.pause_seconds,
            "full_scan": int(full),
        }
        self._emit("swapped", version, **{**fields, **self._details(self.last), **traced(version.meta)})

    def _pause(self) -> None:
        try:
            self._engine.pause(self._kv_cache)
        except BaseException as error:
            if self.state is not SwapState.QUARANTINED:
                self._resume(self._intervals.latest)  # the engine may have paused although the call failed
            if isinstance(error, EngineUnavailable) or not isinstance(error, Exception):
                raise
            raise EngineUnavailable(f"{self._engine.name} does not pause: {error}") from error
        if self.state is not SwapState.QUARANTINED:
            self.state = SwapState.PAUSED
        self._intervals.end()

    def _handle_failure(self, prepared: PreparedSwap, error: BaseException, served: Version | None, version: Version) -> NoReturn:
        self._emit("swap-failed", version, error=type(error).__name__, reason=str(error))
        message = f"{self._engine.name} could not be brought to {version.describe()}: {_reason(error)}"
        try:
            prepared.revert()
        except BaseException as second:
            raise self._quarantine(f"{message}; reverting this failed too: {_reason(second)}", version) from second
        if self.state is SwapState.QUARANTINED:  # it is back at weights that were unknown before
            raise self._quarantine(message, version) from error
        self._resume(served)
        if isinstance(error, EngineRefused | EngineAsleep) or not isinstance(error, Exception):
            raise error
        raise SwapFailed(message) from error

    def _quarantine(self, message: str, version: Version) -> EngineQuarantined:
        self.state = SwapState.QUARANTINED
        self._emit("engine-quarantined", version, reason=message)
        return EngineQuarantined(message)

    def _resume(self, version: Version | None) -> None:
        """Resume with the weights of `version`. A failure only changes the state, because the weights are known.

        This holds for Ctrl-C too. If it were raised here, the caller would take a swap that was made for one that was not.
        """
        self._intervals.begin(version)
        try:
            self._engine.resume()
            self.state, self._resume_error = SwapState.SERVING, None
        except BaseException as error:
            self.state, self._resume_error = SwapState.HALTED, error
            if not isinstance(error, Exception):
                self._interruption = error
            emit(self._on_event, "resume-failed", engine=self._engine.name, error=type(error).__name__, reason=str(error))

    def _emit(self, name: str, version: Version, **fields: Value) -> None:
        emit(self._on_event, name, engine=self._engine.name, seq=version.seq, updates=version.updates, **fields)


def _reason(error: BaseException) -> str:
    """Return the text of an error without its hint and the final full stop."""
    return (error.message if isinstance(error, DeltawireError) else str(error)).removesuffix(".")
