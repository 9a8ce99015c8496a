"""Spreads the work that a GPU does for staging over time, so that generation hardly slows down."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

DEFAULT_SHARE = 0.025
"""The share of a GPU's time that staging may take, unless the user says otherwise.

The goals are that generation slows down by less than 3%, and that 8 billion weights are staged within a second. Half a percent of the 3%
is left for Python, which the server's own thread waits for. At this share, an H200 takes 0.96 s for 8.2 billion weights."""

_BYTES_PER_ELEMENT = 14.0
"""Decoding an element takes a GPU as long as reading this many bytes, whatever its type. An H200, which reads 4.9 TB/s, decodes 8.2 billion
elements of bf16 or fp8 in 24 ms."""

_BETWEEN_FILES = 1e-3
"""The seconds that the staging thread leaves Python to the others after each file, so that they catch up."""

_USUAL_BANDWIDTH = 2e12
"""Bytes per second that are assumed of a GPU that does not tell its bandwidth."""


class StagingPace:
    """Lets the staging thread wait between parts of its work, if it is ahead of its pace.

    Generation loses the time that the GPU decodes, however this time is spread. Without a pace, it loses all of it at once.

    Parameters
    ----------
    share
        The share of the GPU's time that staging may take. 1 means that it never waits.
    bandwidth
        Bytes per second that the GPU reads from its memory. None on a CPU, where staging never waits.
    clock, sleep
        For tests.
    """

    def __init__(
        self,
        share: float,
        bandwidth: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds = 0.0 if bandwidth is None or share >= 1 else _BYTES_PER_ELEMENT / bandwidth / share
        self._clock, self._sleep = clock, sleep
        self._next = 0.0

    @property
    def waits(self) -> bool:
        """True unless it never waits."""
        return self._seconds > 0

    def begin(self) -> None:
        """Begin a staging. Time that passed before it does not count."""
        self._next = self._clock()

    def after(self, elements: float) -> None:
        """Wait after this many elements were decoded, until their share of time has passed."""
        self._next += elements * self._seconds
        ahead = self._next - self._clock()
        if ahead > 0:
            self._sleep(ahead)

    def between_files(self) -> None:
        """Wait a moment after a file was read. The time counts as if it were spent on decoding."""
        if self.waits:
            self._sleep(_BETWEEN_FILES)


def memory_bandwidth(device: torch.device) -> float | None:
    """Return the bytes per second that a GPU can read from its memory. Returns None for a CPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(device)
    clock, width = getattr(facts, "memory_clock_rate", 0), getattr(facts, "memory_bus_width", 0)  # in kHz and in bits
    return 2e3 * clock * width / 8 or _USUAL_BANDWIDTH
