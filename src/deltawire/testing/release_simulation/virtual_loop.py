"""An event loop of asyncio in virtual time, for one simulated process. Work in executors becomes virtual threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any

from ..fleet_simulation.kernel import Process
from .blocking import blocking_steps

_Loop: Any = asyncio.AbstractEventLoop
"""A base without a type: the loop has only the methods that tasks, futures and timers use."""


class VirtualLoop(_Loop):  # type: ignore[misc]
    """Runs coroutines of a process. They end with the process.

    Parameters
    ----------
    process
        The process.
    entered
        Called before each step of a coroutine, so that the code sees the clock of this process.
    """

    def __init__(self, process: Process, entered: Callable[[], None]) -> None:
        self._process = process
        self._entered = entered
        self._tasks: list[asyncio.Task[Any]] = []

    def time(self) -> float:
        return self._process.kernel.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., Any], *arguments: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, arguments, self, context)
        self._process.kernel.later(0.0, self._run, handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *arguments: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.time() + delay, callback, arguments, self, context)
        self._process.kernel.later(max(delay, 0.0), self._run, handle)
        return handle

    def call_at(self, when: float, callback: Callable[..., Any], *arguments: Any, context: Context | None = None) -> asyncio.TimerHandle:
        return self.call_later(when - self.time(), callback, *arguments, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled handle does nothing when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name or "simulated")
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()

        def ended(value: Any, error: Exception | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)

        self._process.start(blocking_steps(partial(func, *args)), ended)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Raise the error of a task that nobody waits for. A process that was killed leaves tasks behind, which is no error."""
        if self._process.alive and context.get("exception") is not None:
            raise context["exception"]

    def run(self, coroutine: Coroutine[Any, Any, Any], ended: Callable[[Any, BaseException | None], None]) -> None:
        """Run a coroutine, and call `ended` with its result or its error, unless the process is killed before that.

        Parameters
        ----------
        coroutine
            The coroutine.
        ended
            Called at its end.
        """

        def done(task: asyncio.Task[Any]) -> None:
            error = task.exception()
            ended(None if error else task.result(), error)

        self.create_task(coroutine).add_done_callback(done)

    def kill(self) -> None:
        """Forget all tasks, after the process was killed."""
        with self._as_running():
            for task in self._tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with contextlib.suppress(BaseException):
                        task.get_coro().close()
        self._tasks.clear()

    def _run(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled() and self._process.running(self._run, handle):
            with self._as_running():
                self._entered()
                handle._run()
            if len(self._tasks) > 64:
                self._tasks = [task for task in self._tasks if not task.done()]

    @contextlib.contextmanager
    def _as_running(self) -> Any:
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)
