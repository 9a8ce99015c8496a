"""A clock for fetchers that tests control."""

from __future__ import annotations


class Waiting:
    """A clock for fetchers. It moves only when they sleep, and it then calls `meanwhile`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()
