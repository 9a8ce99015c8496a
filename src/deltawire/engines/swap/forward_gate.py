"""Keeps forward passes and swaps apart: they never run at the same time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from ...errors import EngineUnavailable
from ..base import KvCache


class ForwardGate:
    """Lets any number of forward passes run on any threads while it is open, and none while it is closed.

    A thread that is in a forward pass may enter again. A generation is a series of forward passes of one thread that share a KV cache.
    If the gate closes with `KvCache.DROP`, generations that have begun run to their end.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passes = 0
        self._generations = 0
        self._closed: KvCache | None = None
        self._of_thread = threading.local()

    def enter(self) -> None:
        """Begin a forward pass. Waits while the gate is closed."""
        if self._depth("passes") == 0:
            with self._changed:
                self._changed.wait_for(self._may_pass)
                self._passes += 1
        self._of_thread.passes = self._depth("passes") + 1

    def leave(self) -> None:
        """End a forward pass. Does nothing in a thread that is in none."""
        if self._depth("passes") == 0:
            return
        self._of_thread.passes -= 1
        if self._of_thread.passes == 0:
            with self._changed:
                self._passes -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def generation(self) -> Iterator[None]:
        """Begin a generation, and end it with the context. Waits while the gate is closed."""
        if self._depth("generations") == 0:
            with self._changed:
                self._changed.wait_for(lambda: self._closed is None)
                self._generations += 1
        self._of_thread.generations = self._depth("generations") + 1
        try:
            yield
        finally:
            self._of_thread.generations -= 1
            if self._of_thread.generations == 0:
                with self._changed:
                    self._generations -= 1
                    self._changed.notify_all()

    def close(self, kv_cache: KvCache, timeout: float) -> None:
        """Start no new forward passes, and wait until those that run have ended.

        Raises `EngineUnavailable`, and opens the gate again, if they take too long.

        Parameters
        ----------
        kv_cache
            `DROP` also waits for generations that have begun. Otherwise they are interrupted between two forward passes.
        timeout
            Seconds to wait.
        """
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
                    f"{self._passes} forward passes and {self._generations} generations did not end within {timeout} seconds."
                )

    def open(self) -> None:
        """Let forward passes and generations begin again. Does nothing if the gate is open."""
        with self._changed:
            self._open()

    def _open(self) -> None:
        self._closed = None
        self._changed.notify_all()

    def _may_pass(self) -> bool:
        return self._closed is None or (self._closed is KvCache.DROP and self._depth("generations") > 0)

    def _is_quiet(self) -> bool:
        return self._passes == 0 and (self._closed is not KvCache.DROP or self._generations == 0)

    def _depth(self, kind: str) -> int:
        depth: int = getattr(self._of_thread, kind, 0)
        return depth
