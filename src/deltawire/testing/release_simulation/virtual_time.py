"""The time that code without a clock of its own sees, and its random pauses, while a simulation runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

from ...gateway import feedback
from ...gateway.recording import known_ids
from ...publish import channels
from ...store import create_rule
from ..fleet_simulation.kernel import Kernel
from .blocking import sleep

_START = 1_600_000_000


class VirtualTime:
    """Takes the place of the module `time` in the code of gateways."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self._offset = 0.0

    def enter(self, offset: float) -> None:
        """Say that a process runs now whose clock is wrong by this many seconds."""
        self._offset = offset

    def time(self) -> float:
        """Return the time of the process that runs."""
        return _START + self.kernel.now + self._offset

    def time_ns(self) -> int:
        """Return the time of the process that runs, in nanoseconds."""
        return int(self.time() * 1000) * 1_000_000

    def monotonic(self) -> float:
        """Return seconds that never run backwards."""
        return self.kernel.now


@contextlib.contextmanager
def virtual_time(random: Random) -> Iterator[VirtualTime]:
    """Within this context, gateways and writers of channels see virtual time.

    Parameters
    ----------
    random
        Draws pauses.
    """
    time = VirtualTime()
    honest: list[tuple[Any, str, Any]] = [
        (feedback, "time", time),
        (known_ids, "time", time),
        (channels, "create_and_look", partial(create_rule.create_and_look, sleep=sleep)),
        (create_rule, "random", random),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in honest]
    for module, name, value in honest:
        setattr(module, name, value)
    try:
        yield time
    finally:
        for module, name, value in before:
            setattr(module, name, value)
