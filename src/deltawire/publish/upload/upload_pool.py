"""Threads that upload, and do not keep the process from ending.

`ThreadPoolExecutor` does not suit here. Before a process ends, Python waits for its threads as long as they take, so a store that does not
answer would hang the process. And it refuses work once the main thread has ended, so a thread that still trains could publish nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from ..at_exit import wait_at_exit

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Task = tuple["Future[Any]", Callable[[], Any]]


class UploadPool(Executor):
    """Runs tasks on up to `threads` daemon threads. The end of the process waits for running tasks, but not for ever (see `at_exit`)."""

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished: set[Future[Any]] = set()
        self._is_shut_down = self._is_abandoned = False
        ending = weakref.finalize(self, _end, self._tasks, threads)  # ends the threads when the pool is garbage: no more tasks can come
        ending.atexit = False
        wait_at_exit(self)

    def submit(self, fn: Callable[_P, _Result], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_Result]:
        """Run `fn` on one of the threads, after the tasks that were submitted before. Raises RuntimeError after `shutdown`."""
        future: Future[_Result] = Future()
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("the pool was shut down")
            if len(self._threads) < self._most:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
            self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        self._tasks.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more tasks, and end the threads when all tasks are done. With `wait`, return after that."""
        with self._lock:
            is_first, self._is_shut_down = not self._is_shut_down, True
            unfinished = list(self._unfinished)
        if cancel_futures:
            for future in unfinished:
                future.cancel()
        if is_first:
            _end(self._tasks, len(self._threads))
        if wait and not self._is_abandoned:
            for thread in self._threads:
                thread.join()

    def finish(self, seconds: float | None) -> None:
        """Accept no more tasks, and wait until all are done, or for this many seconds. Then abandon them: nothing waits for them.

        A task that runs continues until it ends by itself, or the process ends. The others are cancelled.
        """
        self.shutdown(wait=False)
        with self._lock:
            unfinished = list(self._unfinished)
        if wait(unfinished, seconds).not_done:
            self._is_abandoned = True
            self.shutdown(wait=False, cancel_futures=True)

    def wait_until_idle(self, seconds: float) -> None:
        """Return when every task is done or abandoned, or after this many seconds."""
        with self._lock:
            unfinished = [] if self._is_abandoned else list(self._unfinished)
        wait(unfinished, seconds)


def _work(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, run = task
        if future.set_running_or_notify_cancel():
            try:
                result = run()
            except BaseException as error:  # `result` of the future raises it
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del task, future, run  # they hold memory of the state that is uploaded


def _end(tasks: SimpleQueue[_Task | None], threads: int) -> None:
    for _ in range(threads):
        tasks.put(None)
