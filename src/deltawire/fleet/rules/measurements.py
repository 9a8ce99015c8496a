"""The trainer's measurements: how fast each member is, and how long tasks take. Times are seconds of the fleet clock (`FleetClock`)."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field


def blend(beta: float, old: float | None, new: float) -> float:
    """Return a moving average: `beta` is the weight of the earlier one, if there is one."""
    return new if old is None else beta * old + (1 - beta) * new


@dataclass(slots=True)
class MemberRecord:
    """The measurements of one member.

    Parameters
    ----------
    last_busy
        When the member last had work, or joined.
    """

    last_busy: float = float("-inf")
    rate: float | None = None
    """Accepted tokens per second."""
    interval: float | None = None
    """Seconds between two accepted results while the member has work."""
    tokens: int = 0
    results: int = 0
    elapsed: float = 0.0
    finished: float = float("-inf")
    seconds_per_task: float | None = None
    latency: float | None = None
    """Seconds from a lease to its result, of leases that the member took while it had no other work."""
    proven: int = 0
    lost: int = 0
    """How many results in a row were lost or refused."""
    live: bool = True

    def rejoined(self, now: float) -> None:
        """Note that the member has come back. It keeps its measured speed."""
        self.live, self.proven, self.last_busy = True, 0, now
        self.tokens, self.results, self.elapsed = 0, 0, 0.0

    def delivered(
        self, tokens: int, *, offered: float, leased: float, finished: float, is_timed: bool, beta: float, window: float
    ) -> float | None:
        """Note a result (`Scheduler.delivered`). Return how long the task took if that was measured and the result was accepted."""
        was_free = leased >= self.finished
        if is_timed:
            self.tokens += tokens
            self.results += tokens > 0
            self.elapsed += max(0.0, finished - max(offered, self.finished))
        self.finished = self.last_busy = max(self.finished, finished)
        if self.elapsed >= window:
            measured = self.tokens / self.elapsed
            self.rate = blend(beta, self.rate or None, measured)  # 0: nothing was accepted before
            if self.results:
                self.interval = blend(beta, self.interval, self.elapsed / self.results)
            self.tokens, self.results, self.elapsed = 0, 0, 0.0
        if tokens == 0:
            self.proven, self.lost = 0, self.lost + 1
            return None
        self.proven, self.lost = self.proven + 1, 0
        if not is_timed:
            return None
        duration = max(0.0, finished - leased)
        if was_free:
            self.latency = blend(beta, self.latency, duration)
        self.seconds_per_task = blend(beta, self.seconds_per_task, duration)
        return duration


@dataclass(slots=True)
class Durations:
    """How long the last tasks of the fleet took."""

    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=65), init=False)
    _sorted: list[float] = field(default_factory=list, init=False)

    @property
    def typical(self) -> float | None:
        """The median; None while nothing is known."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else None

    def add(self, seconds: float) -> None:
        """Note how long a task took."""
        if len(self._recent) == self._recent.maxlen:
            self._sorted.remove(self._recent[0])
        self._recent.append(seconds)
        insort(self._sorted, seconds)
