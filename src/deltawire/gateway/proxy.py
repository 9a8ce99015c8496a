"""Sends a request to an engine, and the answer to the caller.

An engine that is lost before the first byte of its answer was passed on is replaced by another one, or waited for: the caller notices
nothing but the time. Afterwards a stream ends with an event that names the error.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from ..engines.answer_table import RECORD_HEADER, REQUEST_ID
from ..errors import EngineLost, EnginesAway, GatewayError
from ..events import OnEvent, emit
from .channel_watch import ChannelWatch
from .engine_client import EngineResponse, NoAnswer
from .engine_pool import EnginePool, PooledEngine, joined
from .http.bodies import Headers, Send, dump, error_body, send_bytes, send_start
from .http.event_stream import mapped_events
from .http.memory import Reservation, json_memory
from .http.requests import CHANNEL_HEADER, EPISODE_HEADER, ID_HEADER, VERSION_HEADER, AskedFor, with_own_fields
from .options import GatewayOptions
from .recording.inline_answers import InlineAnswer
from .recording.recorder import MOST_COPY, Recorder, Recording

_MOST_LOSSES = 3
"""A request that was being answered by this many engines when they failed or were lost may itself be the reason."""
_REFUSALS = (429, 502, 503, 504)
"""An engine that answers so cannot answer now."""
_OWN_TRIES = 5
"""A request that was refused is tried again this many times on its own channel before an engine of another one may answer it."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""The seconds between attempts that are refused. Each pause is twice as long as the one before."""
_ENDS = (b"data: [DONE]", b"event: response.completed", b"event: response.incomplete")
"""One of these is in the last event of a stream."""
_PASSED_ON = ("accept", "traceparent", "tracestate", "x-session-id")


class _Failed(Exception):
    """An engine has answered with status 500, so it runs. Another one may do better."""


class Proxy:
    """Answers requests with the engines of a pool.

    Parameters
    ----------
    pool
        The engines.
    channels
        Knows which users belong to which channel.
    recorder
        Records answers.
    options
        How long a request waits for an engine, and the most bytes of an answer that is not streamed.
    on_event
        Called with "answered" and "answer-failed".
    """

    def __init__(
        self, pool: EnginePool, channels: ChannelWatch, recorder: Recorder, *, options: GatewayOptions, on_event: OnEvent | None = None
    ) -> None:
        self._pool, self._channels, self._recorder = pool, channels, recorder
        self._most_bytes, self._patience = options.most_bytes, options.patience
        self._on_event = on_event

    async def answer(self, asked: AskedFor, raw: bytes, headers: Headers, send: Send) -> None:
        """Answer a request. Raises a `GatewayError` if nothing was sent to the caller."""
        start = time.perf_counter()
        asked.channel = self._channels.channel_of(asked.user or asked.episode or asked.id)
        avoided, losses, refusals, pause = None, 0, 0, _FIRST_PAUSE
        while True:
            engine = await self._pool.take(asked.channel, avoided, stays=0 < refusals <= _OWN_TRIES)
            is_refused = False
            try:
                is_last = losses >= _MOST_LOSSES - 1 or time.perf_counter() - start > self._patience
                if await self._attempt(engine, asked, raw, headers, send, is_last=is_last):
                    emit(
                        self._on_event,
                        "answered",
                        route=asked.route,
                        engine=engine.address.url,
                        channel=engine.address.channel,
                        seq=engine.seq,
                        seconds=time.perf_counter() - start,
                    )
                    return
                is_refused = True
            except _Failed:
                losses += 1  # the request may be the reason, so the engine gets others
            except NoAnswer as lost:
                losses += lost.was_sent
                self._pool.lost(engine, lost)
                if losses >= _MOST_LOSSES:
                    raise EnginesAway(f"{losses} engines failed while they answered this request; of the last one: {lost.short}.") from None
            finally:
                self._pool.give_back(engine)
            avoided = engine
            if is_refused:  # others may refuse, too
                await asyncio.sleep(pause)
                refusals, pause = refusals + 1, min(2 * pause, _LONGEST_PAUSE)

    async def _attempt(self, engine: PooledEngine, asked: AskedFor, raw: bytes, headers: Headers, send: Send, *, is_last: bool) -> bool:
        """Try one engine. Returns False if it refuses at present. Raises `_Failed`, and `NoAnswer` if it does not answer."""
        recording = self._recorder.begin(asked, engine)
        try:
            return await self._pass_on(engine, asked, raw, headers, send, recording, is_last=is_last)
        finally:
            if recording is not None:
                recording.close()

    async def _pass_on(
        self,
        engine: PooledEngine,
        asked: AskedFor,
        raw: bytes,
        headers: Headers,
        send: Send,
        recording: Recording | None,
        *,
        is_last: bool,
    ) -> bool:
        inline = InlineAnswer(asked) if recording is not None and not engine.keeps_answers and asked.route != "responses" else None
        own = {"content-type": "application/json", REQUEST_ID: asked.id, **self._pool.headers}
        own |= {name: headers[name] for name in _PASSED_ON if headers.get(name, "").isascii() and name in headers}
        if recording is not None and engine.keeps_answers:
            own[RECORD_HEADER] = "1"
        route = {"chat": "/v1/chat/completions"}.get(asked.route, f"/v1/{asked.route}")
        body = with_own_fields(asked, raw, inline=inline is not None)
        response = await self._pool.client.post(engine.address.url + route, body, own)
        try:
            if not is_last and response.status == 500:
                raise _Failed
            if not is_last and response.status in _REFUSALS:
                return False
            told = self._headers(asked, engine)
            if response.status == 200 and response.kind.startswith("text/event-stream"):
                await self._stream(response, asked, recording, inline, told, send)
            else:
                data = await joined(response.chunks(), self._most_bytes, asked.memory)
                if response.status == 200:
                    data = _with_id(data, asked, inline)
                    if recording is not None:
                        recording.answered([data], inline)
                await send_bytes(send, data, response.kind, status=response.status, headers=told)
            return True
        finally:
            response.close()

    async def _stream(
        self,
        response: EngineResponse,
        asked: AskedFor,
        recording: Recording | None,
        inline: InlineAnswer | None,
        headers: Headers,
        send: Send,
    ) -> None:
        with asked.memory.another() as event_memory:
            await self._send_events(response, asked, recording, inline, headers, send, event_memory)

    async def _send_events(
        self,
        response: EngineResponse,
        asked: AskedFor,
        recording: Recording | None,
        inline: InlineAnswer | None,
        headers: Headers,
        send: Send,
        event_memory: Reservation,
    ) -> None:
        chunks = response.chunks()
        try:
            first = await anext(chunks)
        except StopAsyncIteration:
            raise NoAnswer("its answer is empty", was_sent=True) from None
        if recording is not None:
            recording.begun()
        await send_start(send, 200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers})
        events = _after(first, chunks)
        if inline is not None or asked.id.encode() not in first:
            events = mapped_events(events, lambda value: _changed(value, asked, inline), event_memory)
        copies: list[bytes] = []
        room = MOST_COPY + 1  # a stream may have no end
        held: bytes | None = None
        try:
            async for data in events:
                if room and not asked.memory.fits(min(room, len(data))):
                    copies, room = [], 0  # the answer continues, and is recorded without its text
                if room:
                    copies.append(data[:room])
                    room -= len(copies[-1])
                if held is not None:
                    data, held = held + data, None
                if recording is not None and any(end in data for end in _ENDS):
                    held = data  # callers may go away when they have it, so the engine must end its answer first
                else:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except (NoAnswer, GatewayError) as error:
            lost = error if isinstance(error, GatewayError) else EngineLost(f"the engine was lost in mid-answer: {error.short}.")
            emit(self._on_event, "answer-failed", route=asked.route, error=type(lost).__name__, reason=str(error))
            await send({"type": "http.response.body", "body": b"data: " + dump(error_body(lost)) + b"\n\n"})
            return
        if recording is not None:
            recording.answered(copies, inline)
        await send({"type": "http.response.body", "body": held or b""})

    def _headers(self, asked: AskedFor, engine: PooledEngine) -> dict[str, str]:
        told = {ID_HEADER: asked.id}
        if asked.episode is not None:
            told[EPISODE_HEADER] = asked.episode
        if engine.address.channel is not None:
            told[CHANNEL_HEADER] = engine.address.channel
        if engine.seq is not None:
            told[VERSION_HEADER] = str(engine.seq)
        return told


async def _after(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in chunks:
        yield chunk


def _changed(value: Any, asked: AskedFor, inline: InlineAnswer | None) -> Any:
    """Return an event as the caller sees it: with the id, and without what the caller did not ask for."""
    if inline is not None:
        value = inline.take(value)
    holder = value.get("response") if isinstance(value.get("response"), dict) else value
    if "id" in holder and asked.id not in str(holder["id"]) and "error" not in value:
        holder["id"] = asked.answer_id
    return value


def _with_id(data: bytes, asked: AskedFor, inline: InlineAnswer | None) -> bytes:
    if inline is None and asked.id.encode() in data[:256]:
        return data
    asked.memory.add(2 * json_memory(data))  # it is parsed, and written anew
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return dump(_changed(value, asked, inline)) if isinstance(value, dict) else data
