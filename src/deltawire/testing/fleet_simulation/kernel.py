"""Virtual time: events in order, and processes that can be killed, frozen and cut off at any event."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from typing import Any


class Kernel:
    """A clock that jumps from event to event. Events of the same time happen in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0

    def later(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action` with these arguments after `delay` seconds."""
        self._scheduled += 1
        heapq.heappush(self._queue, (self.now + delay, self._scheduled, action, arguments))

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Run events until no event is left before the time `until`, or until `done` returns true."""
        while self._queue and self._queue[0][0] <= until and not done():
            self.now, _, action, arguments = heapq.heappop(self._queue)
            self.events += 1
            action(*arguments)


class Process:
    """A process that runs steps in one or several virtual threads, until it ends or is killed. Requests that it has sent continue.

    Parameters
    ----------
    name
        The name. Without its last digits it is the kind of process, for counting.
    kernel
        Virtual time.
    perform
        Answers the requests of a thread.
    """

    def __init__(self, name: str, kernel: Kernel, perform: Callable[[VirtualThread, Any], None]) -> None:
        self.name = name
        self.kind = name.rstrip("0123456789")
        self.kernel = kernel
        self.alive = True
        self.frozen = False
        self.cut_off = False
        self.perform = perform
        self._threads: list[VirtualThread] = []
        self._held: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def start(self, steps: Generator[Any, Any, Any], ended: Callable[[Any, Exception | None], None]) -> VirtualThread:
        """Run steps in a new thread. Call `ended` with their result or their error, unless the process is killed before that."""
        thread = VirtualThread(self, steps, ended)
        self._threads.append(thread)
        self.kernel.later(0.0, thread.resume, None)
        return thread

    def kill(self) -> None:
        """Kill the process, as SIGKILL does."""
        self.alive = False
        self._held.clear()
        for thread in self._threads:
            thread.close()
        self._threads.clear()

    def freeze(self) -> None:
        """Stop the process, as SIGSTOP does. Answers wait until it wakes up."""
        self.frozen = True

    def wake(self) -> None:
        """Continue the process, as SIGCONT does. All answers that waited arrive now."""
        self.frozen = False
        while self._held and self.alive and not self.frozen:
            action, arguments = self._held.popleft()
            action(*arguments)

    def running(self, action: Callable[..., None], *arguments: Any) -> bool:
        """Return whether the process runs at this moment. If it is frozen, keep the action until it wakes up."""
        if self.alive and self.frozen:
            self._held.append((action, arguments))
        return self.alive and not self.frozen


class VirtualThread:
    """One thread of a process: a generator of requests. `title` is the name of its function."""

    __slots__ = ("_ended", "_steps", "process", "title")

    def __init__(self, process: Process, steps: Generator[Any, Any, Any], ended: Callable[[Any, Exception | None], None]) -> None:
        self.process = process
        self.title: str = getattr(steps, "__name__", "")
        self._steps = steps
        self._ended = ended

    def resume(self, value: Any) -> None:
        """Send the answer to its request."""
        if self.process.running(self.resume, value):
            self._step(self._steps.send, value)

    def fail(self, error: Exception) -> None:
        """Raise an error as the answer to its request."""
        if self.process.running(self.fail, error):
            self._step(self._steps.throw, error)

    def close(self) -> None:
        self._steps.close()

    def _step(self, move: Callable[[Any], Any], argument: Any) -> None:
        try:
            request = move(argument)
        except StopIteration as end:
            self._ended(end.value, None)
        except Exception as error:  # any error ends this thread; the code that started it judges the error
            self._ended(None, error)
        else:
            self.process.perform(self, request)
