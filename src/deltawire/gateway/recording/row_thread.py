"""A thread on which rows are made and written, because rules of users, routers and the disk may be slow."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

_T = TypeVar("_T")


class RowThread:
    """Calls functions one after the other. The callers wait, so there are never more functions than callers.

    Threads of asyncio cannot begin anything when the interpreter ends; this one can.
    """

    def __init__(self) -> None:
        self._wanted: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="deltawire-rows", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """End the thread after the functions that wait, and wait for it for at most this long."""
        self._wanted.put(None)
        self._thread.join(seconds)

    async def call(self, function: Callable[[], _T]) -> _T:
        """Call a function on the thread, and return its result or raise its exception."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def tell(result: _T | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        def call() -> None:
            if future.cancelled():
                return
            try:
                found, error = function(), None
            except Exception as raised:
                found, error = None, raised
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits now
                loop.call_soon_threadsafe(tell, found, error)

        self._wanted.put(call)
        return await future

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            wanted()
