"""Forward passes on one side, swaps on the other: never both at a time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from ...errors import EngineUnavailable
from ..base import KvCache


class ForwardGate:
    """Any number of forward passes, on any threads, or none while it is closed. A thread that is inside may enter again.

    A generation is a run of forward passes of one thread that share a KV cache. When the gate closes with `KvCache.DROP`, those that have
    begun go on to their end.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passes = 0
        self._generations = 0
        self._closed: KvCache | None = None
        self._mine = threading.local()

    def enter(self) -> None:
        """Begin a forward pass; waits while the gate is closed."""
        if self._depth("passes") == 0:
            with self._changed:
                self._changed.wait_for(self._may_pass)
                self._passes += 1
        self._mine.passes = self._depth("passes") + 1

    def leave(self) -> None:
        """End it. Does nothing in a thread that is not inside."""
        if self._depth("passes") == 0:
            return
        self._mine.passes -= 1
        if self._mine.passes == 0:
            with self._changed:
                self._passes -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def generation(self) -> Iterator[None]:
        """Begin a generation; waits while the gate is closed."""
        if self._depth("generations") == 0:
            with self._changed:
                self._changed.wait_for(lambda: self._closed is None)
                self._generations += 1
        self._mine.generations = self._depth("generations") + 1
        try:
            yield
        finally:
            self._mine.generations -= 1
            if self._mine.generations == 0:
                with self._changed:
                    self._generations -= 1
                    self._changed.notify_all()

    def close(self, kv_cache: KvCache, timeout: float) -> None:
        """Let nothing new in, and wait until all that must end has ended. On a time-out the gate is open again."""
        if self._depth("passes") or (kv_cache is KvCache.DROP and self._depth("generations")):
            raise EngineUnavailable("weights cannot be swapped by a thread that is itself in the middle of a forward pass or generation.")
        deadline = time.monotonic() + timeout
        with self._changed:
            if self._closed is not None:
                return
            self._closed = kv_cache
            try:
                done = self._changed.wait_for(self._is_quiet, max(0.0, deadline - time.monotonic()))
            except BaseException:
                self._open()
                raise
            if not done:
                self._open()
                raise EngineUnavailable(
                    f"{self._passes} forward passes and {self._generations} generations did not end in {timeout} seconds."
                )

    def open(self) -> None:
        """Let everything in again. Does nothing if it is open."""
        with self._changed:
            self._open()

    def _open(self) -> None:
        self._closed = None
        self._changed.notify_all()

    def _may_pass(self) -> bool:
        return self._closed is None or (self._closed is KvCache.DROP and self._depth("generations") > 0)

    def _is_quiet(self) -> bool:
        return self._passes == 0 and (self._closed is KvCache.KEEP or self._generations == 0)

    def _depth(self, kind: str) -> int:
        depth: int = getattr(self._mine, kind, 0)
        return depth
