"""Runs code that blocks, such as gates and uploads, in virtual time: a store call becomes a request of a virtual thread.

Each piece of such code has a thread of the system, but only one of all threads runs at any time: the code runs until it asks the store,
and then waits until virtual time has brought the answer. So a run is the same every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from ...store.base import Buffer, ObjectInfo, Progress, Store
from ...store.requests import Create, Delete, Get, Head, List, Put, Sleep
from ..faulty_store import ProcessDied

_current = threading.local()


class _Call:
    """Blocking code, and the request that it waits for. The locks `asked` and `answered` pass the turn between the two threads."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.asked, self.answered = threading.Lock(), threading.Lock()
        self.asked.acquire()
        self.answered.acquire()
        self.request: Any = None
        self.answer: Any = None
        self.failure: BaseException | None = None
        self.is_over = False
        self.result: Any = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="deltawire-simulated", daemon=True)

    def _run(self) -> None:
        _current.call = self
        self.answered.acquire()
        try:
            if self.failure is None:
                self.result = self._function()
        except ProcessDied:
            pass
        except Exception as error:  # the virtual thread raises it
            self.error = error
        self.is_over = True
        self.asked.release()

    def ask(self, request: Any) -> Any:
        """Wait for the answer to a request, in the thread of the blocking code."""
        if isinstance(self.failure, ProcessDied):
            raise self.failure
        self.request = request
        self.asked.release()
        self.answered.acquire()
        if self.failure is not None:
            failure = self.failure
            if not isinstance(failure, ProcessDied):
                self.failure = None
            raise failure
        return self.answer

    def turn(self, answer: Any, failure: BaseException | None) -> None:
        """Let the blocking code run until its next request, or its end."""
        self.answer, self.failure = answer, failure
        self.answered.release()
        self.asked.acquire()


def blocking_steps(function: Callable[[], Any]) -> Generator[Any, Any, Any]:
    """Run a function that blocks as the steps of a virtual thread. If the thread is closed, the function dies at its present call.

    Parameters
    ----------
    function
        The function. It may call `ask`, `sleep` and the methods of `VirtualStore`.
    """
    call = _Call(function)
    call.thread.start()
    answer: Any = None
    failure: Exception | None = None
    try:
        while True:
            call.turn(answer, failure)
            if call.is_over:
                break
            answer, failure = None, None
            try:
                answer = yield call.request
            except Exception as error:
                failure = error
    finally:
        while not call.is_over:  # the process was killed
            call.turn(None, ProcessDied())
        call.thread.join()
    if call.error is not None:
        raise call.error
    return call.result


def ask(request: Any) -> Any:
    """Return the answer to a request. Only code that `blocking_steps` runs may call it.

    Parameters
    ----------
    request
        The request.
    """
    return _current.call.ask(request)


def sleep(seconds: float) -> None:
    """Wait in virtual time.

    Parameters
    ----------
    seconds
        How long to wait.
    """
    ask(Sleep(seconds))


class VirtualStore(Store):
    """The simulated store, for code that blocks."""

    url = "memory://live"

    def get(self, key: str, *, limit: int) -> bytes:
        found: bytes = ask(Get(key, limit))
        return found

    def head(self, key: str) -> ObjectInfo:
        found: ObjectInfo = ask(Head(key))
        return found

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        raise NotImplementedError("the simulated store has no large objects")

    def put_if_absent(self, key: str, data: bytes) -> None:
        ask(Create(key, data))

    def put(
        self,
        key: str,
        data: Buffer | Iterable[Buffer],
        *,
        size: int | None = None,
        progress: Progress | None = None,
        durable: bool = True,
    ) -> None:
        assert isinstance(data, bytes)
        ask(Put(key, data))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        return iter(ask(List(prefix, after)))

    def delete(self, keys: Iterable[str]) -> None:
        ask(Delete(tuple(keys)))

    def close(self) -> None:
        """Do nothing: the store stays open."""
