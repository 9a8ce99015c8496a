"""Takes feedback: checks it, writes it to the store together with other feedback that waits, and acknowledges it only then."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice, zip_longest
from typing import Any, NamedTuple, TypeAlias

from blake3 import blake3

from ..errors import (
    DeltawireError,
    EpisodeShared,
    FeedbackConflict,
    FeedbackNotStored,
    GatewayBusy,
    InteractionExpired,
    InteractionUnknown,
    RequestMalformed,
)
from ..events import OnEvent, emit
from ..format.feedback import MAX_FEEDBACK_BYTES, MAX_METRIC_NAME, MAX_REVISION, MAX_TEXT_VALUE, Feedback, FeedbackFile, Value, check_float
from ..format.live_parts import INFERENCE_ID, id_time, new_inference_id
from ..format.records.live_records import Metric
from ..format.records.record_parts import READER
from ..store.base import Store
from ..store.live_keys import LiveKey, feedback_key
from .http.api_keys import Caller
from .http.memory import Reservation
from .http.requests import check_tags, read_id
from .recording.known_ids import Known, KnownIds

_FIELDS = {"inference_id", "episode_id", "metric_name", "value", "tags", "feedback_id", "revision", "dryrun", "caller"}
_MOST_WAITING, _MOST_OF_SENDER = 8192, 1024
_MOST_SEEN = 100_000
_BATCH = 512
_REFRESH_SECONDS = 1.0
_LATE_SECONDS = 60.0
"""Only the store's clock decides when a window ends. The gateway refuses feedback that is certainly later than this."""


def read_feedback(body: Mapping[str, Any], caller: Caller, *, key: str | None = None) -> Feedback:
    """Read feedback in TensorZero's form. Raises `RequestMalformed`.

    Parameters
    ----------
    body
        The JSON object of the request.
    caller
        The sender.
    key
        The header Idempotency-Key, which gives the feedback its id if the body has none.
    """
    given = {name: value for name, value in body.items() if value is not None}
    if unknown := given.keys() - _FIELDS:
        raise RequestMalformed(f"feedback has no field {min(map(str, unknown))[:80]!r}; it has {', '.join(sorted(_FIELDS))}.")
    targets = [name for name in ("inference_id", "episode_id") if name in given]
    if len(targets) != 1:
        raise RequestMalformed("feedback needs an inference_id or an episode_id, and not both.")
    target = read_id(given[targets[0]], targets[0])
    if targets == ["inference_id"] and not INFERENCE_ID.fullmatch(target):
        raise InteractionUnknown(f"{target} is not the id of an interaction.")
    metric, revision = given.get("metric_name"), given.get("revision", 0)
    if not isinstance(metric, str) or not 1 <= len(metric) <= MAX_METRIC_NAME or not metric.isprintable():
        raise RequestMalformed(f"metric_name must be a printable text of 1 to {MAX_METRIC_NAME} characters.")
    if type(revision) is not int or not 0 <= revision <= MAX_REVISION:
        raise RequestMalformed(f"revision must be a whole number from 0 to {MAX_REVISION:,}.")
    now = time.time_ns() // 1_000_000
    if "feedback_id" in given:
        name = read_id(given["feedback_id"], "feedback_id")
    else:
        name = new_inference_id(now) if key is None else derived_id("key", caller.name or "", key)
    return Feedback(
        id=name,
        metric=metric,
        value=_value(given.get("value")),
        inference=target if targets == ["inference_id"] else None,
        episode=target if targets == ["episode_id"] else None,
        revision=revision,
        time=now,
        tags=check_tags(given.get("tags", {}), "tags"),
        caller=_meant(given.get("caller"), caller),
    )


def _meant(named: Any, sender: Caller) -> str | None:
    """Return the caller whose interactions feedback is about. Only who may give feedback on everything can name another one."""
    if named is None or named == sender.name:
        return None if sender.feedback_on_all and named is None else sender.name
    if not isinstance(named, str) or not READER.fullmatch(named):
        raise RequestMalformed("caller must be the name of a caller.")
    if not sender.feedback_on_all:
        raise InteractionUnknown(f"there is nothing of the caller {named} on which this caller may give feedback.")
    return named


def derived_id(*parts: str) -> str:
    """Return an id that the same parts always give, a UUID of version 8."""
    digest = bytearray(blake3("\0".join(parts).encode(errors="replace")).digest(16))
    digest[6], digest[8] = digest[6] & 0x0F | 0x80, digest[8] & 0x3F | 0x80
    return str(uuid.UUID(bytes=bytes(digest)))


def _value(value: Any) -> Value:
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and abs(value) < 1e30 and check_float(float(value)):
        return float(value)
    if isinstance(value, str) and 1 <= len(value) <= MAX_TEXT_VALUE and not any(0xD800 <= ord(each) < 0xE000 for each in value):
        return value
    raise RequestMalformed(f"value must be true, false, a number from -10^9 to 10^9, or a text of 1 to {MAX_TEXT_VALUE:,} characters.")


class _Seen(NamedTuple):
    """The hash of feedback that came, and whether the store has it. The feedback itself is kept only while it waits."""

    content: bytes
    stored: asyncio.Future[None]


_Waiting: TypeAlias = tuple[Feedback, asyncio.Future[None]]


class FeedbackIntake:
    """Stores feedback. Use it from one event loop.

    Parameters
    ----------
    store
        The store.
    run
        The id of the run.
    session
        The session of the gateway.
    known
        Knows which interactions exist.
    metrics
        Returns the declared metrics by name.
    seconds
        Seconds that the store has to confirm feedback.
    on_event
        Called with "feedback-stored", "feedback-acknowledged" and "feedback-waits".
    """

    def __init__(
        self,
        store: Store,
        run: str,
        session: str,
        known: KnownIds,
        metrics: Callable[[], Mapping[str, Metric]],
        *,
        seconds: float = 30.0,
        on_event: OnEvent | None = None,
    ) -> None:
        self._store, self._run, self._session, self._known, self._metrics = store, run, session, known, metrics
        self._seconds = seconds
        self._on_event = on_event
        self._number = 0
        self._waiting: dict[str | None, list[_Waiting]] = {}
        """The feedback that waits, by its sender. The sender whose turn is next comes first."""
        self._seen: OrderedDict[tuple[str | None, str], _Seen] = OrderedDict()
        self._arrived = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed = -_REFRESH_SECONDS
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to store feedback."""
        self._task = asyncio.create_task(self._commit())

    async def close(self) -> None:
        """Stop. Feedback that was not stored was not acknowledged either."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for seen in self._seen.values():
            seen.stored.cancel()

    async def check(self, feedback: Feedback) -> Feedback:
        """Return the feedback as its metric has it, and about the episode of one caller.

        Raises `InteractionUnknown`, `InteractionExpired`, `EpisodeShared` or `RequestMalformed`.
        """
        if feedback.caller is None and feedback.episode is not None:
            feedback = await self._of_one_caller(feedback, feedback.episode)
        known = self._find(feedback)
        if known is None:
            await self._refresh()
            known = self._find(feedback)
        kind, target = feedback.target
        if known is None or (feedback.caller is not None and feedback.caller != known.caller):
            raise InteractionUnknown(f"there is no {kind} {target} on which this caller may give feedback.")
        metric = self._metrics().get(feedback.metric)
        if metric is None:
            return feedback
        if metric.level != kind:
            raise RequestMalformed(f"the metric {metric.name!r} is about an {metric.level}, not about an {kind}.")
        if metric.type == "float" and isinstance(feedback.value, bool):
            feedback = replace(feedback, value=float(feedback.value))
        if metric.number(feedback.value) is None:
            allowed = "true or false" if metric.type == "boolean" else f"a number from {metric.lowest:g} to {metric.highest:g}"
            raise RequestMalformed(f"the value of the metric {metric.name!r} must be {allowed}.")
        if time.monotonic() - known.since > metric.window + _LATE_SECONDS:
            raise InteractionExpired(f"the window of the metric {metric.name!r} ended; it is {metric.window:,} s long.")
        return feedback

    async def store(self, feedback: Feedback, memory: Reservation | None = None, *, sender: str | None = None) -> None:
        """Return when the store has the feedback. Its memory stays reserved as long as it waits, even if its sender has stopped waiting.

        Raises `FeedbackConflict` if its id was used for other feedback, `FeedbackNotStored` if the store does not confirm it in time, and
        `GatewayBusy`.

        Parameters
        ----------
        feedback
            The feedback.
        memory
            The memory of its request.
        sender
            The name of the caller that sent it, for whose feedback there is a limit. None if the gateway has no keys.
        """
        content = blake3(repr(replace(feedback, time=0)).encode(errors="replace")).digest(16)
        name = (feedback.caller, feedback.id)
        found = self._seen.get(name)
        if found is None:
            if sum(map(len, self._waiting.values())) >= _MOST_WAITING:
                raise GatewayBusy("too much feedback waits for the store.")
            if sender is not None and len(self._waiting.get(sender, ())) >= _MOST_OF_SENDER:
                raise GatewayBusy(f"too much feedback of the caller {sender} waits for the store; {_MOST_OF_SENDER:,} may wait.")
            found = self._seen[name] = _Seen(content, asyncio.get_running_loop().create_future())
            if memory is not None:
                memory.hold()
                found.stored.add_done_callback(lambda _: memory.close())
            self._waiting.setdefault(sender, []).append((feedback, found.stored))
            self._arrived.set()
            while len(self._seen) > _MOST_SEEN and next(iter(self._seen.values())).stored.done():
                self._seen.popitem(last=False)
        elif found.content != content:
            raise FeedbackConflict(f"feedback {feedback.id} was sent before, with other contents.")
        try:
            await asyncio.wait_for(asyncio.shield(found.stored), self._seconds)
        except asyncio.TimeoutError:
            raise FeedbackNotStored(f"the store did not confirm feedback {feedback.id} within {self._seconds:g} s.") from None

    def _find(self, feedback: Feedback) -> Known | None:
        kind, target = feedback.target
        return self._known.inference(target) if kind == "inference" else self._known.episode(target, feedback.caller)

    async def _of_one_caller(self, feedback: Feedback, episode: str) -> Feedback:
        """Return feedback on an episode with the name of the caller that has the episode. Raises `EpisodeShared` if several have it."""
        await self._refresh()  # another gateway may know another caller
        callers = self._known.callers(episode)
        if len(callers) > 1:
            raise EpisodeShared(f"{len(callers)} callers have an episode {episode}.")
        return replace(feedback, caller=next(iter(callers), None))

    async def _refresh(self) -> None:
        """Read which interactions other gateways have stored, at most once in a while, and once for all who ask."""
        now = asyncio.get_running_loop().time()
        if self._refreshing is None and now - self._refreshed < _REFRESH_SECONDS:
            return
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._read_store())
        await asyncio.shield(self._refreshing)

    async def _read_store(self) -> None:
        try:
            with contextlib.suppress(DeltawireError):  # the id stays unknown, and the sender may try again
                await asyncio.to_thread(self._known.refresh)
        finally:
            self._refreshed, self._refreshing = asyncio.get_running_loop().time(), None

    async def _commit(self) -> None:
        """Store everything that waits as one object, again and again. A put that failed is repeated with the same bytes."""
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            data, batch = self._next_file()
            key = feedback_key(LiveKey(self._session, self._number, blake3(data).hexdigest()))
            problem: str | None = None
            start = time.monotonic()
            while True:
                try:
                    await asyncio.to_thread(functools.partial(self._store.put, key, data))
                    break
                except Exception as error:  # whatever it is, what waits is stored later
                    if str(error) != problem:
                        problem = str(error)
                        emit(self._on_event, "feedback-waits", reason=problem)
                    await asyncio.sleep(1.0)
            for _, stored in batch:
                stored.set_result(None)
            seconds = time.monotonic() - start
            emit(self._on_event, "feedback-stored", number=self._number, feedback=len(batch), seconds=seconds)
            for feedback, _ in batch:
                self._tell_age(feedback)
            del data, batch
            self._number += 1

    def _tell_age(self, feedback: Feedback) -> None:
        metric = feedback.metric if feedback.metric in self._metrics() else None
        if feedback.inference is not None:
            age: float | None = (feedback.time - id_time(feedback.inference)) / 1000
        else:
            known = self._find(feedback)
            age = None if known is None else time.monotonic() - known.since
        emit(self._on_event, "feedback-acknowledged", metric=metric, age_seconds=None if age is None else max(age, 0.0))

    def _next_file(self) -> tuple[bytes, list[_Waiting]]:
        """Take what fits into one object, of each sender in turn. Those who wait for their turn come first in the next one."""
        rounds = zip_longest(*self._waiting.values())
        first = list(islice((each for one_of_each in rounds for each in one_of_each if each is not None), _BATCH))
        count = len(first)
        while True:
            batch = list({each[0].id: each for each in reversed(first[:count])}.values())[::-1]  # a file has each id once
            file = FeedbackFile(self._run, self._session, self._number, tuple(feedback for feedback, _ in batch))
            if len(batch) == 1 or sum(len(repr(one)) for one, _ in batch) * 6 < MAX_FEEDBACK_BYTES:  # a character takes 6 bytes at most
                data = file.to_bytes()
                break
            count = (count + 1) // 2
        taken = {id(each) for each in batch}
        for sender, waiting in list(self._waiting.items()):
            left = [each for each in waiting if id(each) not in taken]
            if len(left) < len(waiting):
                del self._waiting[sender]
                if left:
                    self._waiting[sender] = left
        return data, batch
