"""Keeps forward passes and swaps apart: they never run at the same time."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import EngineUnavailable
from ..base import KvCache


class ForwardLock:
    """Lets any number of forward passes run on any threads while it is free, and none while a swap has it.

    A thread that is in a forward pass may enter again. A generation is a series of forward passes of one thread that share a KV cache.
    If a swap takes the lock with `KvCache.DROP`, generations that have begun run to their end.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passes = 0
        self._generations = 0
        self._taken: KvCache | None = None
        self._of_thread = threading.local()

    def enter(self) -> None:
        """Begin a forward pass. Waits while a swap has the lock."""
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
        """Begin a generation, and end it with the context. Waits while a swap has the lock."""
        if self._depth("generations") == 0:
            with self._changed:
                self._changed.wait_for(lambda: self._taken is None)
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

    def acquire(self, kv_cache: KvCache, timeout: float) -> None:
        """Start no new forward passes, and wait until those that run have ended.

        Raises `EngineUnavailable`, and releases the lock again, if they take too long.

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
            if self._taken is not None:
                return
            self._taken = kv_cache
            try:
                done = self._changed.wait_for(self._is_quiet, max(0.0, deadline - time.monotonic()))
            except BaseException:
                self._release()
                raise
            if not done:
                self._release()
                raise EngineUnavailable(
                    f"{self._passes} forward passes and {self._generations} generations did not end within {timeout} seconds."
                )

    def release(self) -> None:
        """Let forward passes and generations begin again. Does nothing if no swap has the lock."""
        with self._changed:
            self._release()

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Begin a forward pass, and end it with the context. Waits while a swap has the lock."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def _release(self) -> None:
        self._taken = None
        self._changed.notify_all()

    def _may_pass(self) -> bool:
        return self._taken is None or (self._taken is KvCache.DROP and self._depth("generations") > 0)

    def _is_quiet(self) -> bool:
        return self._passes == 0 and (self._taken is not KvCache.DROP or self._generations == 0)

    def _depth(self, kind: str) -> int:
        depth: int = getattr(self._of_thread, kind, 0)
        return depth


class LockedForward:
    """The method `forward` of a module, which holds a lock together with other forward passes.

    It ends its pass after every exception, even after Ctrl-C.

    torch's hooks would not do: torch does not call them after an exception that is no `Exception`. A copy of the module has the method that
    was there before.

    Parameters
    ----------
    module
        The module.
    lock
        The lock.
    """

    def __init__(self, module: Any, lock: ForwardLock) -> None:
        self._module = module
        self._before: Callable[..., Any] = module.forward
        self._was_own = "forward" in vars(module)
        self._lock: ForwardLock | None = lock
        functools.update_wrapper(self, self._before)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass."""
        if self._lock is None:
            return self._before(*args, **kwargs)
        with self._lock.forward_pass():
            return self._before(*args, **kwargs)

    def remove(self) -> None:
        """Give the module back the method that it had. Does nothing if that was done."""
        self._lock = None  # other code may have wrapped this object
        if vars(self._module).get("forward") is not self:
            return
        if self._was_own:
            self._module.forward = self._before
        else:
            del self._module.forward

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any]]]:
        return _same, (self._before,)


def _same(method: Callable[..., Any]) -> Callable[..., Any]:
    return method
