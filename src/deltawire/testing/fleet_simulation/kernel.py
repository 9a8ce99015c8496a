"""Virtual time: events in order, and processes that can be killed, frozen and cut off at any of them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from typing import Any


class Kernel:
    """A clock that jumps from event to event. Events of the same time happen in the order in which they were announced."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._announced = 0

    def later(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        """Have something happen after so many seconds."""
        self._announced += 1
        heapq.heappush(self._queue, (self.now + delay, self._announced, action, arguments))

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Let events happen until there is none before `until`, or `done` says so."""
        while self._queue and self._queue[0][0] <= until and not done():
            self.now, _, action, arguments = heapq.heappop(self._queue)
            self.events += 1
            action(*arguments)


class Process:
    """Something that runs steps, one or several at a time, until it ends or is killed. What it has sent to the store is not called back."""

    def __init__(self, name: str, kernel: Kernel, perform: Callable[[Strand, Any], None]) -> None:
        self.name = name
        self.kind = name.rstrip("0123456789")
        self.kernel = kernel
        self.alive = True
        self.frozen = False
        self.cut_off = False
        self.perform = perform
        self._strands: list[Strand] = []
        self._held: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def start(self, steps: Generator[Any, Any, Any], ended: Callable[[Any, Exception | None], None]) -> Strand:
        """Run steps from now on. `ended` is told what they returned, or what they raised; not if the process is killed before."""
        strand = Strand(self, steps, ended)
        self._strands.append(strand)
        self.kernel.later(0.0, strand.resume, None)
        return strand

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more."""
        self.alive = False
        self._held.clear()
        for strand in self._strands:
            strand.close()
        self._strands.clear()

    def freeze(self) -> None:
        """SIGSTOP: answers that come in wait for it."""
        self.frozen = True

    def wake(self) -> None:
        """SIGCONT: everything that waited happens now."""
        self.frozen = False
        while self._held and self.alive and not self.frozen:
            action, arguments = self._held.popleft()
            action(*arguments)

    def running(self, action: Callable[..., None], *arguments: Any) -> bool:
        """Whether the process runs at this moment. If it is frozen, the action is kept until it wakes."""
        if self.alive and self.frozen:
            self._held.append((action, arguments))
        return self.alive and not self.frozen


class Strand:
    """One generator of requests within a process."""

    __slots__ = ("_ended", "_steps", "process")

    def __init__(self, process: Process, steps: Generator[Any, Any, Any], ended: Callable[[Any, Exception | None], None]) -> None:
        self.process = process
        self._steps = steps
        self._ended = ended

    def resume(self, value: Any) -> None:
        """Answer its request."""
        if self.process.running(self.resume, value):
            self._step(self._steps.send, value)

    def fail(self, error: Exception) -> None:
        """Answer its request with an error."""
        if self.process.running(self.fail, error):
            self._step(self._steps.throw, error)

    def close(self) -> None:
        self._steps.close()

    def _step(self, move: Callable[[Any], Any], argument: Any) -> None:
        try:
            request = move(argument)
        except StopIteration as end:
            self._ended(end.value, None)
        except Exception as error:  # whatever it raises ends this strand; who started it judges
            self._ended(None, error)
        else:
            self.process.perform(self, request)
