"""Bounded repetition with growing, jittered pauses."""

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
    """Repeat what fails with `StoreUnavailable`, and nothing else: every other error is an answer, or a question for the caller.

    The pause before repetition n is drawn from the upper half of `first` · 2ⁿ seconds, at most `longest`: clients that fail together must
    not come back together. `on_event` gets an event "retrying" before each pause: the reason, the number of the next attempt, and how many
    there are at most.
    """

    retries: int
    first: float = 0.2
    longest: float = 10.0
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = random.random  # in [0, 1)
    on_event: OnEvent | None = None

    def call(self, attempt: Callable[[], T]) -> T:
        """The result of the first attempt that succeeds; the error of the last, after `retries` repetitions."""
        for repetition in range(self.retries):
            try:
                return attempt()
            except StoreUnavailable as error:
                emit(self.on_event, "retrying", reason=str(error), attempt=repetition + 2, attempts=self.retries + 1)
                self.sleep(min(self.longest, self.first * 2**repetition) * (1 + self.draw()) / 2)
        return attempt()
