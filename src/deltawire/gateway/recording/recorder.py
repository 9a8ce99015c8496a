"""Records answers: an intent in the journal before the answer ends, then a row, then a file in the store. Answers never wait for the store.

An engine keeps what it drew for a while (`engines.answer_table`), so the gateway asks it after the answer, again and again while the engine
cannot be reached. If the gateway is killed in between, its next start finds the intent in the journal and asks then.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...engines.routed_experts import ModelRouters
from ...events import OnEvent, emit
from ..engine_pool import EnginePool, PooledEngine
from ..http.memory import MemoryBudget
from ..http.requests import AskedFor
from ..options import GatewayOptions
from .answer_queues import AnswerQueues, Told, Waiting
from .answers import Unusable, intent_of, row_of
from .inline_answers import InlineAnswer
from .journal import Journal
from .known_ids import KnownIds
from .redaction import RedactionFailed
from .row_thread import RowThread
from .uploads import Uploads

_MOST_WAITING = 20_000
MOST_COPY = 1 << 20
"""Longer answers are recorded without the facts that are read from their text."""
_THREAD_SECONDS = 10.0
_LONGEST_SYNC = 10.0
"""A disk that needs longer than this for a sync may soon take no writes into memory either, and then answers would wait for it."""
_MOST_TOLD = 100
_ASK_AGAIN = Unusable("the engine has not reported yet what it drew.")


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
            user=None if (user := asked.user_of_caller) is None else recorder.user_hash(user),
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
        Returns the hash of a user of a caller.
    routers
        Returns the routers of the model.
    on_event
        Called with "recording-stopped", "recording-resumed", "interaction-unusable" and "interaction-untrained".
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
        self._told: set[str] = set()
        self._waiting_bytes = 0
        self._queues = AnswerQueues(pool, memory, self._record, lambda one, reason: self._unusable(one.journal, one.intent, reason))
        self._rows = RowThread()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to record. Answers of ended sessions come first."""
        self._rows.start()
        for journal in self._ended:
            for data in list(journal.open_intents.values()):
                self._queues.add(Waiting(journal, json.loads(data), lambda: None))
        self._watching = asyncio.create_task(self._watch_size())

    async def close(self, seconds: float) -> None:
        """Record what was answered, for at most this long. The rest stays in the journal."""
        await self._queues.close(seconds)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._rows.close(_THREAD_SECONDS)

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
            self._known.keep(intent["id"], intent["episode"], intent["caller"])
            self._journal.add_intent(intent["id"], intent)
        except OSError as error:
            self._cannot_write(error)
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
            self._cannot_write(error)

    def finish(self, recording: Recording) -> None:
        """Record an answer that was given."""
        memory = recording.asked.memory
        if len(self._queues) >= _MOST_WAITING or self._waiting_bytes + memory.size > self._memory.most // 2:  # the rest is for requests
            self._unusable(self._journal, recording.intent, "too many answers wait to be recorded.")
            return
        memory.hold()
        size = memory.size
        self._waiting_bytes += size

        def release() -> None:
            self._waiting_bytes -= size
            memory.close()

        self._queues.add(Waiting(self._journal, recording.intent, release, recording))

    async def _record(self, waiting: list[Waiting], told: Told | None) -> list[Waiting]:
        """Record answers, and return those that the engine must be asked for again."""
        oldest = None
        if told is None:
            try:
                (one,) = waiting
                oldest = await self._oldest(self._engine(one), one.intent["seq"])
            except Unusable as error:
                self._unusable(one.journal, one.intent, str(error))
                one.release()
                return []
        modes = [None if (engine := self._engine(one)) is None else engine.logprobs for one in waiting]
        outcomes = await self._rows.call(partial(self._write_rows, waiting, modes, told, oldest))
        left = []
        for one, problem in zip(waiting, outcomes, strict=True):
            if problem is _ASK_AGAIN:
                left.append(one)
                continue
            if isinstance(problem, OSError):  # the next start records the answer
                self._cannot_write(problem)
            elif problem is not None:
                self._unusable(one.journal, one.intent, str(problem))
            one.release()
        return left

    def _write_rows(self, waiting: list[Waiting], modes: list[str | None], told: Told | None, oldest: int | None) -> list[Exception | None]:
        """Write the rows of answers, on the thread for this. Return for each answer why it is not recorded, or None."""
        answers, left = ({}, frozenset[str]()) if told is None else told.answers(waiting)
        outcomes: list[Exception | None] = []
        for one, mode in zip(waiting, modes, strict=True):
            if one.name in left:
                outcomes.append(_ASK_AGAIN)
                continue
            try:
                row = self._row(one, mode, answers.get(one.name), oldest)
            except (Unusable, RedactionFailed) as error:
                outcomes.append(error)
                continue
            except Exception as error:  # an answer of a form that nobody thought of
                outcomes.append(Unusable(f"{type(error).__name__}: {error}"))
                continue
            try:
                if one.journal.add_row(one.name, row):
                    self._uploads.hurry()
                outcomes.append(None)
            except (OSError, ValueError) as error:
                outcomes.append(error)
        return outcomes

    def _row(self, one: Waiting, mode: str | None, found: Any, oldest: int | None) -> dict[str, Any]:
        recording: Recording | None = one.recording
        calls = one.intent.get("calls")
        if calls is None:
            if found is None:
                raise Unusable("the engine no longer has the answer.")
            calls, mode = found.get("calls"), found.get("logprobs")
        return row_of(
            one.intent,
            calls,
            logprobs=mode if isinstance(mode, str) else None,
            oldest=oldest,
            asked=None if recording is None else recording.asked,
            copies=() if recording is None else recording.copies,
            redact=self._options.redact,
            keeps_text=self._options.text,
            routers=self._routers,
            on_untrained=self._untrained,
        )

    def _untrained(self, reason: str) -> None:
        """Tell each reason once."""
        if reason not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(reason)
            emit(self._on_event, "interaction-untrained", reason=reason)

    async def _oldest(self, engine: PooledEngine | None, before: int | None) -> int | None:
        """Return the oldest version that an engine without labelled tokens had since a request."""
        if engine is None or before is None:
            return None
        await self._pool.look(engine)
        if not engine.up or engine.seq is None:
            raise Unusable("the engine was lost, so the version of its tokens is not known.")
        return min(before, engine.seq)

    def _engine(self, one: Waiting) -> PooledEngine | None:
        if one.recording is not None:
            engine: PooledEngine = one.recording.engine
            return engine
        return next((engine for engine in self._pool.engines if engine.address.url == one.intent["engine"]), None)

    def _unusable(self, journal: Journal, intent: dict[str, Any], reason: str) -> None:
        emit(self._on_event, "interaction-unusable", reason=reason)
        try:
            journal.drop_intent(str(intent["id"]))
        except OSError as error:
            self._cannot_write(error)

    async def _watch_size(self) -> None:
        """Stop recording while the journal is full, or its disk hangs."""
        while True:
            if (reason := self._hindrance()) is not None:
                self._stop(reason)
            elif self._stopped is not None:
                self._stopped = None
                emit(self._on_event, "recording-resumed")
            await asyncio.sleep(self._options.flush)

    def _hindrance(self) -> str | None:
        if self._uploads.sync_seconds > _LONGEST_SYNC:
            return f"the disk of the journal {self._options.journal} has not finished a sync for {_LONGEST_SYNC:g} s"
        size = self._journal.size + sum(journal.size for journal in self._ended if not journal.is_closed)
        if size <= self._options.journal_bytes:
            return None
        most = f"{self._options.journal_bytes:,} are allowed"
        return f"the journal {self._options.journal} has {size:,} bytes, because the store does not take them; {most}"

    def _cannot_write(self, error: OSError) -> None:
        self._stop(f"the journal {self._options.journal} cannot be written: {error.strerror or error}")

    def _stop(self, reason: str) -> None:
        if self._stopped is None:
            emit(self._on_event, "recording-stopped", reason=reason)
        self._stopped = reason
