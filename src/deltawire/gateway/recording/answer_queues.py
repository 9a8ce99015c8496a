"""Asks engines what they drew, several answers at a time, until they answer or no longer have the record.

Each engine has a queue. While an engine cannot be reached, its queue rests for growing times, and all other queues continue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ...engines.answer_table import ANSWERS_ROUTE, MOST_LISTED
from ...errors import EngineLost, GatewayFull, RequestTooLarge
from ..engine_client import NoAnswer
from ..engine_pool import EnginePool
from ..http.memory import MemoryBudget, Reservation, json_memory
from .journal import Journal

_AT_ONCE = 4
"""This many requests for answers are sent to an engine at the same time."""
_MOST_ANSWER = 256 << 20
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_ASK_SECONDS = 3600.0
"""An engine that cannot be reached for this long is not asked again. An engine that answers says itself which answers it no longer has."""
_HOPELESS = 4
"""After this many failures in a row, the end of the gateway does not wait for an engine. The next start asks it again."""


@dataclasses.dataclass(slots=True, eq=False)
class Waiting:
    """An answer that waits to be recorded.

    Parameters
    ----------
    journal
        The journal that has its intent.
    intent
        The intent.
    release
        Releases the memory that it takes.
    recording
        What else is known about it. None for an answer of an ended session.
    failures
        How often the engine did not tell.
    since
        The time when the engine was asked first.
    """

    journal: Journal
    intent: dict[str, Any]
    release: Callable[[], None]
    recording: Any = None
    failures: int = 0
    since: float | None = None

    @property
    def name(self) -> str:
        """The id of the answer."""
        return str(self.intent["id"])


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """The reply of an engine that was asked for answers.

    Parameters
    ----------
    data
        The bytes of its reply.
    is_list
        Whether it was asked for several answers.
    """

    data: bytes
    is_list: bool

    def answers(self, asked: Sequence[Waiting]) -> tuple[Mapping[str, Any], frozenset[str]]:
        """Return the answers by id, and the ids that must be asked for again. Raises `ValueError` if it cannot be read."""
        try:
            found = json.loads(self.data)
        except RecursionError:
            raise ValueError("the engine's answer is nested too deeply") from None
        if not self.is_list:
            return {asked[0].name: found}, frozenset()
        try:
            return {str(each["id"]): each for each in found["answers"]}, frozenset(map(str, found["left"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"the engine's list of answers cannot be read: {error!r:.100}") from None


class _Queue:
    """The answers of one engine that wait. Those that are known already have a queue of their own, in which nobody is asked."""

    def __init__(self, url: str, is_known: bool) -> None:
        self.url, self.is_known = url, is_known
        self.waiting: deque[Waiting] = deque()
        self.asking = 0
        self.failures = 0
        self.lists = True
        self.limit = MOST_LISTED
        self.rest: asyncio.TimerHandle | None = None

    def take(self) -> list[Waiting]:
        """Return the answers that are asked for next."""
        most = self.limit if self.lists and not self.is_known else 1
        return [self.waiting.popleft() for _ in range(min(most, len(self.waiting)))]


class AnswerQueues:
    """The queues of all engines. Use them from the event loop.

    Parameters
    ----------
    pool
        The engines.
    memory
        The memory for what they tell.
    record
        Records answers, and returns those that the engine must be asked for again. It gets None for answers that are known already, and
        raises `ValueError` if the engine's reply cannot be read.
    unusable
        Called with an answer that cannot be recorded, and the reason.
    """

    def __init__(
        self,
        pool: EnginePool,
        memory: MemoryBudget,
        record: Callable[[list[Waiting], Told | None], Awaitable[list[Waiting]]],
        unusable: Callable[[Waiting, str], None],
    ) -> None:
        self._pool, self._memory, self._record, self._unusable = pool, memory, record, unusable
        self._queues: dict[tuple[str, bool], _Queue] = {}
        self._later: dict[Waiting, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return sum(len(queue.waiting) for queue in self._queues.values()) + len(self._later)

    def add(self, one: Waiting) -> None:
        """Record an answer as soon as possible."""
        url, is_known = str(one.intent["engine"]), "calls" in one.intent
        queue = self._queues.setdefault((url, is_known), _Queue(url, is_known))
        queue.waiting.append(one)
        self._go_on(queue)

    async def close(self, seconds: float) -> None:
        """Record what waits, for at most this long. Nothing happens after that."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self._has_hope() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for queue in self._queues.values():
            if queue.rest is not None:
                queue.rest.cancel()
            for one in queue.waiting:
                one.release()
        for one, timer in self._later.items():
            timer.cancel()
            one.release()

    def _has_hope(self) -> bool:
        is_moving = any((queue.waiting or queue.asking) and queue.failures < _HOPELESS for queue in self._queues.values())
        return is_moving or any(one.failures < _HOPELESS for one in self._later)

    def _go_on(self, queue: _Queue) -> None:
        """Ask as much as may be asked now."""
        while queue.waiting and queue.rest is None and not self._is_closed and queue.asking < (1 if queue.failures else _AT_ONCE):
            queue.asking += 1
            task = asyncio.create_task(self._ask(queue, queue.take()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, queue: _Queue, asked: list[Waiting]) -> None:
        open_ones = list(asked)
        try:
            left = await self._asked(queue, asked)
            open_ones = []
            queue.waiting.extendleft(reversed(left))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # an answer of a form that nobody thought of
            open_ones = []
            for one in asked:
                self._give_up(one, f"{type(error).__name__}: {error}")
        finally:
            queue.asking -= 1
            for one in open_ones:
                one.release()
        self._go_on(queue)

    async def _asked(self, queue: _Queue, asked: list[Waiting]) -> list[Waiting]:
        """Ask for answers and record them. Return those that are asked for next, before others."""
        if queue.is_known:
            return await self._record(asked, None)
        is_list = len(asked) > 1
        with self._memory.reservation() as memory:
            try:
                status, data = await self._get(queue.url, asked, memory)
            except GatewayFull as error:
                queue.limit = max(1, len(asked) // 2)
                return self._failed(queue, asked, str(error))
            except (RequestTooLarge, EngineLost) as error:
                if is_list:
                    queue.limit = 1
                    return asked
                self._give_up(asked[0], str(error))
                return []
            except NoAnswer as error:
                queue.lists = True  # another server may be there next time
                return self._failed(queue, asked, str(error))
            if is_list and 300 <= status < 500:
                queue.lists = False
                return asked
            if status == 404:
                queue.failures = 0
                self._give_up(asked[0], "the engine no longer has the answer.")
                return []
            if status != 200:
                queue.limit = 1  # one answer of several may be the reason
                return self._failed(queue, asked, f"status {status}")
            queue.failures, queue.limit = 0, min(MOST_LISTED, 2 * queue.limit)
            try:
                return await self._record(asked, Told(data, is_list))
            except ValueError as error:
                if is_list:
                    queue.lists = False
                    return asked
                self._give_up(asked[0], str(error))
                return []

    async def _get(self, url: str, asked: list[Waiting], memory: Reservation) -> tuple[int, bytes]:
        names = ",".join(one.name for one in asked)
        address = url + ANSWERS_ROUTE + (f"?ids={names}" if len(asked) > 1 else names)
        answer = await self._pool.get(address, most=_MOST_ANSWER, memory=memory)
        memory.add(json_memory(answer.data))
        return answer.status, answer.data

    def _failed(self, queue: _Queue, asked: list[Waiting], reason: str) -> list[Waiting]:
        """Let the queue rest, and put the answers back into it later, each after a time of its own."""
        loop = asyncio.get_running_loop()
        queue.failures += 1
        if queue.rest is None:
            queue.rest = loop.call_later(_pause(queue.failures), self._rested, queue)
        for one in asked:
            one.failures += 1
            one.since = loop.time() if one.since is None else one.since
            if loop.time() - one.since > _ASK_SECONDS:
                self._give_up(one, f"the engine does not tell what it drew: {reason}.")
            else:
                self._later[one] = loop.call_later(_pause(one.failures), self._again, one)
        return []

    def _rested(self, queue: _Queue) -> None:
        queue.rest = None
        self._go_on(queue)

    def _again(self, one: Waiting) -> None:
        del self._later[one]
        self.add(one)

    def _give_up(self, one: Waiting, reason: str) -> None:
        self._unusable(one, reason)
        one.release()


def _pause(failures: int) -> float:
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * (1 << min(failures - 1, 10)))
