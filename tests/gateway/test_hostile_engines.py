"""Engines that send without end, or in odd forms: memory stays bounded, and callers get named errors."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import gateway, serving
from tiny_policy import TinyPolicy

from deltawire.engines.answer_table import ENGINE_ROUTE
from deltawire.errors import EngineLost
from deltawire.gateway.engine_client import EngineClient
from deltawire.gateway.engine_pool import EnginePool
from deltawire.gateway.http.api_keys import Caller
from deltawire.gateway.http.bodies import headers_of, read_body, send_json, send_start
from deltawire.gateway.http.event_stream import MOST_EVENT, EventSplitter
from deltawire.gateway.http.http_server import listen
from deltawire.gateway.http.requests import AskedFor
from deltawire.gateway.options import EngineAddress, GatewayOptions
from deltawire.gateway.proxy import Proxy
from deltawire.gateway.recording.inline_answers import _MOST_TOKENS, InlineAnswer
from deltawire.gateway.recording.recorder import MOST_COPY
from deltawire.store import Store

ASKED = AskedFor("chat", {"stream": True}, Caller(), None, None, True)


class HostileEngine:
    """Sends bodies without end on the routes in `endless`, and answers others with `status`."""

    def __init__(self, label: str, *endless: str) -> None:
        self.label, self.endless = label, endless
        self.status = 200

    def serve(self, *, stop: threading.Event, on_ready: Callable[[str], Any]) -> None:
        asyncio.run(listen(self, "127.0.0.1", 0, stop, on_ready))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in self.endless:
            await send_start(send, 200, {"content-type": "application/json"})
            gone = asyncio.ensure_future(receive())
            while not gone.done() or gone.result()["type"] != "http.disconnect":
                await send({"type": "http.response.body", "body": b"{" * (1 << 16), "more_body": True})
                gone = asyncio.ensure_future(receive()) if gone.done() and gone.result()["type"] != "http.disconnect" else gone
                await asyncio.sleep(0)
        elif scope["path"] == ENGINE_ROUTE:
            await send_json(send, {"label": self.label, "running": True})
        else:
            await read_body(receive, headers_of(scope), 1 << 20)
            await send_json(send, {"id": "x"}, status=self.status)


def test_an_answer_without_end_is_read_only_up_to_its_limit() -> None:
    async def get(url: str) -> bytes:
        async with EngineClient() as client:
            return (await EnginePool([EngineAddress(url)], None, client).get(url + "/endless", most=1 << 17)).data  # type: ignore[arg-type]

    with serving(HostileEngine("0", "/endless").serve) as url, pytest.raises(EngineLost, match="more than 131,072 bytes"):
        asyncio.run(get(url))


def test_callers_get_named_errors_when_engines_send_without_end(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    hostile = HostileEngine(str(policy.first.seq), "/v1/models", "/v1/completions")
    with serving(hostile.serve) as url, gateway(store, tmp_path, url, most_bytes=1 << 20) as scene:
        assert scene.get("/v1/models")[0] == 429
        status, answer, _ = scene.post("/v1/completions", {"prompt": "w1"})
        assert (status, answer["error"]["type"]) == (502, "EngineLost")
        assert scene.chat(headers={"traceparent": "\xe9"})[0] == 200  # what engines cannot get is not passed on


class Chunks:
    """A response of an engine whose body comes from an iterator."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks

    def chunks(self) -> AsyncIterator[bytes]:
        return self._chunks


class Notes:
    """Takes the place of a recording."""

    def begun(self) -> None:
        pass

    def answered(self, copies: list[bytes], inline: Any) -> None:
        self.size, self.count = sum(map(len, copies)), len(copies)


def test_a_long_stream_is_passed_on_without_memory_for_it() -> None:
    chunk = b"data: " + json.dumps({"id": ASKED.answer_id}).encode() + b" " * 65536 + b"\n\n"
    passed = 0

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield chunk

    async def send(message: Any) -> None:
        nonlocal passed
        passed += len(message.get("body", b""))

    notes = Notes()
    proxy = Proxy(None, None, None, options=GatewayOptions([EngineAddress("http://127.0.0.1:9")]))  # type: ignore[arg-type]
    asyncio.run(proxy._stream(Chunks(chunks()), ASKED, notes, None, {}, send))  # type: ignore[arg-type]
    assert passed == 1000 * len(chunk)
    assert notes.size == MOST_COPY + 1  # so it is longer than what is read for its facts
    assert notes.count < 20


@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b"event: response.completed\ndata: {}\n\n"])
def test_the_last_event_is_passed_on_when_the_engine_has_ended_its_answer(end: bytes) -> None:
    """The client of OpenAI goes away as soon as it has that event. The answer must be recorded by then."""
    first = b"data: " + json.dumps({"id": ASKED.answer_id}).encode() + b"\n\n"
    happened: list[Any] = []

    class Watched(Notes):
        def answered(self, copies: list[bytes], inline: Any) -> None:
            happened.append("answered")

    async def chunks() -> AsyncIterator[bytes]:
        yield first
        yield end
        happened.append("ended")

    async def send(message: Any) -> None:
        happened.append(message.get("body"))

    proxy = Proxy(None, None, None, options=GatewayOptions([EngineAddress("http://127.0.0.1:9")]))  # type: ignore[arg-type]
    asyncio.run(proxy._stream(Chunks(chunks()), ASKED, Watched(), None, {}, send))  # type: ignore[arg-type]
    assert happened == [None, first, "ended", "answered", end]


def test_tokens_inside_a_stream_are_kept_up_to_a_limit() -> None:
    inline = InlineAnswer(ASKED)
    tokens = [7] * 100_000
    for _ in range(100):
        inline.take({"choices": [{"index": 0, "token_ids": tokens, "logprobs": {"token_logprobs": 5}}]})
    assert len(inline._choices[0]["token_ids"]) <= _MOST_TOKENS
    assert inline.calls() == []
    for told in ("text", 7, {"a": 1}, [[]]):
        short = InlineAnswer(ASKED)
        short.take({"choices": [{"index": 0, "token_ids": [5], "logprobs": {"token_logprobs": told, "content": told}}]})
        assert short.calls()[0]["choices"][0]["token_ids"] == [5]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_events_are_split_alike_however_they_arrive(end: bytes, size: int) -> None:
    events = [b"data: {}", b"event: a" + end[: len(end) // 2] + b"data: 1\r2", b"", b"data: [DONE]"]
    data = b"".join(event + end for event in events) + b"rest\r"
    splitter = EventSplitter()
    found = [event for start in range(0, len(data), size) for event in splitter.feed(data[start : start + size])]
    expected = [event.replace(b"\r\n", b"\n") + b"\n\n" for event in events]
    assert found == expected
    assert splitter.rest() == b"rest\r"


def test_an_event_that_does_not_end_is_refused() -> None:
    splitter = EventSplitter()
    for _ in range(MOST_EVENT >> 20):
        assert splitter.feed(b"x" * (1 << 20)) == []
    with pytest.raises(EngineLost, match="an event of more than"):
        splitter.feed(b"x")
