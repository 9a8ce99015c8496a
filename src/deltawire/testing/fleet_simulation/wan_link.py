"""A link between the origin and another region, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

from ...store import fleet_keys
from ...store.requests import Put, Sleep

PIECES = 8
"""A version crosses a link in this many pieces. A transfer that is cut continues with the piece that it had begun."""

TRY_AGAIN = 5.0
"""Seconds until a relay or a reader tries again after the origin did not answer."""


class WanLink:
    """The link between the origin and one region.

    Parameters
    ----------
    now
        Returns the virtual time.
    delay
        Seconds that a request or an answer takes.
    rate
        Bytes per second in each direction.
    result_bytes
        The size of a result that a member uploads.
    version_bytes
        The size of a version.
    """

    def __init__(self, now: Callable[[], float], *, delay: float, rate: float, result_bytes: float, version_bytes: float) -> None:
        self._now = now
        self.delay = delay
        self.rate = rate
        self.result_bytes = result_bytes
        self.version_bytes = version_bytes
        self.is_cut = False
        self.cut_until = 0.0
        """When the link was last cut."""
        self._free_at = 0.0
        self.pieces: Counter[int] = Counter()
        """How many pieces of each version have crossed the link."""
        self.direct: Counter[int] = Counter()
        """How many copies of each version readers fetched from the origin themselves."""

    def cut(self, seconds: float, later: Callable[..., None]) -> None:
        """Cut the link for this many seconds."""
        self.is_cut = True
        self.cut_until = max(self.cut_until, self._now() + seconds)
        later(self.cut_until - self._now(), self._mend)

    def mend(self) -> None:
        """End all cuts."""
        self.is_cut, self.cut_until = False, self._now()

    def _mend(self) -> None:
        if self._now() >= self.cut_until:
            self.is_cut = False

    def send_seconds(self, request: Any) -> float:
        """Return how long a request of a member takes to the origin. Results of one region share the link, one after the other."""
        if not isinstance(request, Put) or not request.key.startswith(fleet_keys.ROLLOUTS):
            return self.delay
        begin = max(self._now(), self._free_at)
        self._free_at = begin + self.result_bytes / self.rate
        return self._free_at - self._now() + self.delay

    @property
    def piece_seconds(self) -> float:
        """How long a piece of a version takes."""
        return self.version_bytes / self.rate / PIECES

    def fetch_steps(self, seq: int, held: Counter[int]) -> Generator[Any, Any, None]:
        """Fetch the pieces of a version that are missing in `held`, however often the link is cut."""
        while held[seq] < PIECES:
            yield Sleep(self.piece_seconds)
            if self.is_cut:
                yield Sleep(TRY_AGAIN)
                continue
            held[seq] += 1
            self.pieces[seq] += 1
