"""Records answers: an intent in the journal before the answer ends, then a row, then a file in the store. Answers never wait for the store.

An engine keeps what it drew for a while (`engines.answer_table`), so the gateway asks it after the answer. If the gateway is killed in
between, its next start finds the intent in the journal and asks then.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..engines.answer_table import ANSWERS_ROUTE
from ..engines.routed_experts import ModelRouters
from ..errors import GatewayError, GatewayFull
from ..events import OnEvent, emit
from .answers import Unusable, intent_of, row_of
from .engine_pool import EnginePool, PooledEngine
from .inline import InlineAnswer
from .journal import Journal
from .known_ids import KnownIds
from .memory import MemoryBudget, Reservation, json_memory
from .options import GatewayOptions
from .requests import AskedFor
from .uploads import Uploads

_AT_ONCE = 16
"""This many answers are fetched from engines at the same time."""
_MOST_WAITING = 20_000
MOST_COPY = 1 << 20
"""Longer answers are recorded without the facts that are read from their text."""
_MOST_ANSWER = 256 << 20
_TRIES = 5


class Recording:
    """The recording of one answer. `close` ends it in any case.

    Parameters
    ----------
    recorder
        The recorder.
    asked
        The request.
    engine
        The engine that answers it.
    """

    def __init__(self, recorder: Recorder, asked: AskedFor, engine: PooledEngine) -> None:
        self._recorder = recorder
        self.asked = asked
        self.intent = intent_of(
            asked,
            engine=engine.address.url,
            seq=engine.seq,
            channel=engine.address.channel,
            user=None if asked.user is None else recorder.user_hash(asked.user),
        )
        self.engine = engine
        self.copies: Sequence[bytes] = ()
        self._has_begun = False
        self._is_complete = False

    def begun(self) -> None:
        """Say that the first byte of the answer follows."""
        if not self._has_begun:
            self._has_begun = self._recorder.note(self.intent)

    def answered(self, copies: Sequence[bytes], inline: InlineAnswer | None) -> None:
        """Say that the last byte of the answer follows.

        Parameters
        ----------
        copies
            The bytes of the answer.
        inline
            What the answer told about its tokens, if the engine does not keep them.
        """
        self.copies = copies if sum(map(len, copies)) <= MOST_COPY else ()
        if inline is not None:
            if self._has_begun:
                self._recorder.drop(self.intent["id"])
                self._has_begun = False
            self.intent["calls"] = inline.calls()
        self.begun()
        self._is_complete = self._has_begun

    def close(self) -> None:
        """Record the answer if it is complete, and forget it otherwise."""
        if self._is_complete:
            self._recorder.finish(self)
        elif self._has_begun:
            self._recorder.drop(self.intent["id"])


class Recorder:
    """Records the answers of a gateway. Use it from the event loop.

    Parameters
    ----------
    pool
        The engines.
    journal
        The journal of this session.
    ended
        The journals of sessions that ended.
    uploads
        Brings journals into the store.
    known
        Gets the ids of all interactions.
    options
        What is recorded.
    memory
        The memory that requests may take together. Answers that wait to be recorded take at most half of it.
    user_hash
        Returns the hash of a user.
    routers
        Returns the routers of the model.
    on_event
        Called with "recording-stopped", "recording-resumed" and "interaction-unusable".
    """

    def __init__(
        self,
        pool: EnginePool,
        journal: Journal,
        ended: Sequence[Journal],
        uploads: Uploads,
        known: KnownIds,
        options: GatewayOptions,
        *,
        memory: MemoryBudget,
        user_hash: Callable[[str], str],
        routers: Callable[[], ModelRouters | None],
        on_event: OnEvent | None = None,
    ) -> None:
        self._pool, self._journal, self._ended, self._uploads, self._known = pool, journal, ended, uploads, known
        self._options, self._memory = options, memory
        self.user_hash = user_hash
        self._routers = routers
        self._on_event = on_event
        self._stopped: str | None = None
        self._waiting: deque[tuple[Journal, dict[str, Any], Recording | None]] = deque()
        self._waiting_bytes = 0
        self._arrived = asyncio.Event()
        self._busy = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to record. Answers of ended sessions come first."""
        for journal in self._ended:
            for data in list(journal.open_intents.values()):
                self._waiting.append((journal, json.loads(data), None))
        self._arrived.set()
        self._tasks = [asyncio.create_task(self._work()) for _ in range(_AT_ONCE)]
        self._tasks.append(asyncio.create_task(self._watch_size()))

    async def close(self, seconds: float) -> None:
        """Record what was answered, for at most this long. The rest stays in the journal."""
        deadline = asyncio.get_running_loop().time() + seconds
        while (self._waiting or self._busy) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def begin(self, asked: AskedFor, engine: PooledEngine) -> Recording | None:
        """Return a recording of an answer, or None if it is not recorded."""
        if self._stopped is not None or (self._options.share < 1 and random.random() >= self._options.share):
            return None
        if asked.body.get("use_beam_search") or asked.body.get("background") or asked.body.get("echo"):
            return None  # such answers are not drawn token by token, or come later, or repeat the prompt
        if not engine.keeps_answers and (asked.route == "responses" or engine.seq is None):
            return None
        return Recording(self, asked, engine)

    def note(self, intent: dict[str, Any]) -> bool:
        """Write an intent into the journal. Returns False if that is not possible."""
        try:
            self._journal.add_intent(intent["id"], intent)
        except OSError as error:
            self._stop(f"the journal cannot be written: {error}")
            return False
        except ValueError as error:
            emit(self._on_event, "interaction-unusable", reason=str(error))
            return False
        self._known.add(intent["id"], intent["episode"], intent["caller"])
        return True

    def drop(self, name: str) -> None:
        """Forget an intent of this session."""
        try:
            self._journal.drop_intent(name)
        except OSError as error:
            self._stop(f"the journal cannot be written: {error}")

    def finish(self, recording: Recording) -> None:
        """Record an answer that was given."""
        memory = recording.asked.memory
        if len(self._waiting) >= _MOST_WAITING or self._waiting_bytes + memory.size > self._memory.most // 2:  # the rest is for requests
            self._unusable(self._journal, recording.intent, "too many answers wait to be recorded.")
            return
        memory.hold()
        self._waiting_bytes += memory.size
        self._waiting.append((self._journal, recording.intent, recording))
        self._arrived.set()

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            journal, intent, recording = self._waiting.popleft()
            self._busy += 1
            try:
                with self._memory.reservation() as memory:
                    await self._record(journal, intent, recording, memory)
            except Unusable as error:
                self._unusable(journal, intent, str(error))
            except OSError as error:
                self._stop(f"the journal cannot be written: {error}")
            except Exception as error:  # a user's rule, or an answer of a form that nobody thought of
                self._unusable(journal, intent, f"{type(error).__name__}: {error}")
            finally:
                self._busy -= 1
                if recording is not None:
                    self._waiting_bytes -= recording.asked.memory.size
                    recording.asked.memory.close()

    async def _record(self, journal: Journal, intent: dict[str, Any], recording: Recording | None, memory: Reservation) -> None:
        engine = recording.engine if recording is not None else self._engine(str(intent["engine"]))
        if "calls" in intent:
            calls, mode = intent["calls"], None if engine is None else engine.logprobs
            oldest = await self._oldest(engine, intent["seq"])
        else:
            calls, mode = await self._drawn(str(intent["engine"]), str(intent["id"]), memory)
            oldest = None
        row = row_of(
            intent,
            calls,
            logprobs=mode,
            oldest=oldest,
            asked=None if recording is None else recording.asked,
            copies=() if recording is None else recording.copies,
            redact=self._options.redact,
            keeps_text=self._options.text,
            routers=self._routers,
        )
        if journal.add_row(str(intent["id"]), row):
            self._uploads.hurry()

    async def _drawn(self, url: str, name: str, memory: Reservation) -> tuple[Any, str | None]:
        """Ask an engine what it drew. Raises `Unusable` if it does not know, or if the answer does not fit into the memory for long."""
        import httpx

        reason = ""
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(0.1 * 2**attempt)
            try:
                memory.resize(0)
                answer = await self._pool.get(url + ANSWERS_ROUTE + name, most=_MOST_ANSWER, memory=memory)
                memory.add(json_memory(answer.data))
            except GatewayFull as error:
                reason = str(error)
                continue
            except GatewayError as error:
                raise Unusable(str(error)) from None
            except (httpx.HTTPError, OSError) as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if answer.status == 404:
                raise Unusable("the engine does not have the answer any more.")
            if answer.status == 200:
                found = json.loads(answer.data)
                mode = found.get("logprobs")
                return found.get("calls"), mode if isinstance(mode, str) else None
            reason = f"status {answer.status}"
        raise Unusable(f"the engine does not tell what it drew: {reason}.")

    async def _oldest(self, engine: PooledEngine | None, before: int | None) -> int | None:
        """Return the oldest version that an engine without labelled tokens had since a request."""
        if engine is None or before is None:
            return None
        await self._pool.look(engine)
        if not engine.up or engine.seq is None:
            raise Unusable("the engine was lost, so the version of its tokens is not known.")
        return min(before, engine.seq)

    def _engine(self, url: str) -> PooledEngine | None:
        return next((engine for engine in self._pool.engines if engine.address.url == url), None)

    def _unusable(self, journal: Journal, intent: dict[str, Any], reason: str) -> None:
        emit(self._on_event, "interaction-unusable", reason=reason)
        try:
            journal.drop_intent(str(intent["id"]))
        except OSError as error:
            self._stop(f"the journal cannot be written: {error}")

    async def _watch_size(self) -> None:
        """Stop recording while the journal is full."""
        while True:
            size = self._journal.size + sum(journal.size for journal in self._ended if not journal.is_closed)
            if size > self._options.journal_bytes:
                self._stop(
                    f"the journal has {size:,} bytes, because the store does not take them; {self._options.journal_bytes:,} are allowed"
                )
            elif self._stopped is not None:
                self._stopped = None
                emit(self._on_event, "recording-resumed")
            await asyncio.sleep(self._options.flush)

    def _stop(self, reason: str) -> None:
        if self._stopped is None:
            emit(self._on_event, "recording-stopped", reason=reason)
        self._stopped = reason
