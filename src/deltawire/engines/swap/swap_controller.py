"""One swap, from pause to resume, and what happens when a step of it fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from ...chain.version import Version
from ...errors import EngineQuarantined, EngineUnavailable, SwapFailed
from ...events import OnEvent, emit
from ...format.records.chain_records import Commit
from ...subscribe.prepared_swap import PreparedSwap
from ..base import Engine, KvCache
from .live_intervals import LiveIntervals


@dataclass(frozen=True, slots=True)
class SwapRecord:
    """What one swap cost. `wait_seconds` is how long the engine took to stop, `pause_seconds` how long it then stood still."""

    version: Version
    wait_seconds: float
    apply_seconds: float
    confirm_seconds: float
    pause_seconds: float
    full_scan: bool


class SwapController:
    """Takes an engine from one version to the next, leaves it at its version, or quarantines it.

    Every `confirm_every`-th swap, the first among them, is confirmed by reading all weights.
    """

    def __init__(
        self, engine: Engine, intervals: LiveIntervals, *, kv_cache: KvCache, confirm_every: int, on_event: OnEvent | None
    ) -> None:
        if confirm_every < 1:
            raise ValueError(f"confirm_every must be at least 1, not {confirm_every}")
        self._engine = engine
        self._intervals = intervals
        self._kv_cache = kv_cache
        self._confirm_every = confirm_every
        self._on_event = on_event
        self._count = 0
        self._is_halted = False
        """Whether it was paused and could not be resumed, though its weights are whole."""
        self.quarantined: EngineQuarantined | None = None
        """Why the engine must not generate; None if it may."""
        self.last: SwapRecord | None = None

    def swap(self, prepared: PreparedSwap, target: Commit) -> None:
        """See `base.Swap`."""
        version = Version.of(target)
        full = self.quarantined is not None or self._count % self._confirm_every == 0
        clock = self._intervals.clock
        asked = clock()
        served = self._intervals.all()[-1].version
        self._pause()
        self._intervals.end()
        stopped = clock()
        try:
            prepared.apply()
            applied = clock()
            prepared.confirm(full=full)
        except BaseException as error:
            self._take_back(prepared, error, served, version)
        confirmed = clock()
        self._count += 1
        self.quarantined = None
        self._resume(version)
        self.last = SwapRecord(version, stopped - asked, applied - stopped, confirmed - applied, clock() - stopped, full)
        emit(
            self._on_event,
            "swapped",
            engine=self._engine.name,
            seq=version.seq,
            updates=version.updates,
            step=version.step,
            wait_seconds=self.last.wait_seconds,
            apply_seconds=self.last.apply_seconds,
            confirm_seconds=self.last.confirm_seconds,
            pause_seconds=self.last.pause_seconds,
            full_scan=int(full),
        )

    def ensure_running(self) -> None:
        """Resume an engine that did not resume after its last swap. `EngineUnavailable` if it still does not."""
        if self._is_halted and self.quarantined is None:
            self._resume(self._intervals.all()[-1].version)
            if self._is_halted:
                raise EngineUnavailable(f"{self._engine.name} is paused, and does not resume.")

    def _pause(self) -> None:
        try:
            self._engine.pause(self._kv_cache)
        except BaseException as error:
            if self.quarantined is None:
                self._resume(self._intervals.all()[-1].version)  # it may have stopped all the same
            if not isinstance(error, Exception):
                raise
            raise EngineUnavailable(f"{self._engine.name} does not pause: {error}") from error

    def _take_back(self, prepared: PreparedSwap, error: BaseException, served: Version | None, version: Version) -> NoReturn:
        emit(self._on_event, "swap-failed", engine=self._engine.name, seq=version.seq, error=type(error).__name__, reason=str(error))
        what = f"{self._engine.name} could not be brought to {version.describe()}: {error}"
        try:
            prepared.revert()
        except BaseException as second:
            raise self._quarantine(f"{what}; and not back either: {second}") from second
        if self.quarantined is not None:  # it is back at what nobody knew
            raise self._quarantine(what) from error
        self._resume(served)
        if not isinstance(error, Exception):
            raise error
        raise SwapFailed(what) from error

    def _quarantine(self, message: str) -> EngineQuarantined:
        self.quarantined = EngineQuarantined(message)
        emit(self._on_event, "engine-quarantined", engine=self._engine.name, reason=message)
        return self.quarantined

    def _resume(self, version: Version | None) -> None:
        """Its weights are whole. That it does not resume is no reason to doubt that, so it is not raised here."""
        self._intervals.begin(version)
        try:
            self._engine.resume()
            self._is_halted = False
        except Exception as error:
            self._is_halted = True
            emit(self._on_event, "resume-failed", engine=self._engine.name, error=type(error).__name__, reason=str(error))
