"""Repeat requests a limited number of times, with growing random pauses."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..errors import StoreUnavailable
from ..events import OnEvent, emit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retry:
    """Repeats requests that fail with `StoreUnavailable`. Every other error is an answer, or is for the caller to handle.

    The pause before repetition n is random in the upper half of `first` · 2ⁿ seconds, at most `longest`, so that clients that fail together
    do not come back together. An event "retrying" is sent to `on_event` before each pause, with the reason, the number of the next attempt,
    and the largest number of attempts.
    """

    retries: int
    first: float = 0.2
    longest: float = 10.0
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = random.random  # in [0, 1)
    on_event: OnEvent | None = None

    def call(self, attempt: Callable[[], T], *, progress: Callable[[], int] | None = None) -> T:
        """Return the result of the first attempt that succeeds, or raise the error of the last one after `retries` repetitions.

        Parameters
        ----------
        attempt
            Sends the request.
        progress
            Returns how much all attempts have achieved so far. If it has changed, the count of repetitions begins again.
        """
        repetition, done = 0, progress() if progress is not None else 0
        while True:
            try:
                return attempt()
            except StoreUnavailable as error:
                if progress is not None and (now := progress()) != done:
                    repetition, done = 0, now
                if repetition >= self.retries:
                    raise
                emit(self.on_event, "retrying", reason=str(error), attempt=repetition + 2, attempts=self.retries + 1)
                self.sleep(min(self.longest, self.first * 2**repetition) * (1 + self.draw()) / 2)
                repetition += 1
