"""A server that answers like an engine, and fails in the ways that a script says. No real engine fails on demand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from deltawire.engines.answer_table import ANSWERS_ROUTE, ENGINE_ROUTE, RECORD_HEADER, REQUEST_ID, AnswerTable
from deltawire.gateway.http.bodies import headers_of, read_body, send_json, send_start, until_gone
from deltawire.gateway.http.http_server import listen

ANSWER = "vier Worte als Antwort"


def _abort(send: Any) -> None:
    """End the connection at once."""
    send.__self__.transport.abort()


class ScriptedEngine:
    """Answers every request with the same tokens. `script` has the next failures: a status, "reset", "break", "wait" or "gone"."""

    def __init__(self, label: str | None = "0") -> None:
        self.label = label
        self.script: list[int | str] = []
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.go_on = threading.Event()
        self.gone = threading.Event()
        self.table = AnswerTable()
        self.running = True
        self.lists = True
        """Whether it tells several answers at once."""
        self.answers_status = 0
        """The status with which it answers those who ask for answers. 0 is the right one, and -1 closes the connection."""
        self.told: list[str] = []
        self.experts: dict[str, Any] | None = None
        self.sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "changed_by": []}
        """The sampling that it reports with its answers."""

    def serve(self, *, stop: threading.Event, on_ready: Callable[[str], Any]) -> None:
        async def serve() -> None:
            try:
                await listen(self, "127.0.0.1", 0, stop, on_ready)
            finally:
                self.go_on.set()  # otherwise a test that failed would wait for the waiting requests for ever

        asyncio.run(serve())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers, path = headers_of(scope), scope["path"]
        if path == ENGINE_ROUTE:
            await send_json(send, {"label": self.label, "running": self.running, "logprobs": "processed_logprobs"})
        elif path.startswith(ANSWERS_ROUTE):
            query = scope["query_string"]
            self.told.append(path.removeprefix(ANSWERS_ROUTE) or query.decode())
            if self.answers_status == -1:
                _abort(send)
                return
            data = self.table.reply(path, query if self.lists else b"")
            status = self.answers_status or (404 if data is None else 200)
            await send_json(send, json.loads(data or b"{}"), status=status)
        else:
            body = json.loads(await read_body(receive, headers, 1 << 30))
            self.asked.append(body)
            self.headers.append(headers)
            if self.script[:1] == ["gone"]:  # wait until the gateway gives the request up
                await until_gone(receive)
                self.script.pop(0)
                self.gone.set()
            else:
                await self._answer(headers, body, send)

    async def _answer(self, headers: dict[str, str], body: dict[str, Any], send: Any) -> None:
        step = self.script.pop(0) if self.script else "good"
        if isinstance(step, int):
            await send_json(send, {"error": {"message": "scripted"}}, status=step)
            return
        if step == "reset":
            _abort(send)
            return
        if step == "wait":
            await asyncio.to_thread(self.go_on.wait)
        name = headers[REQUEST_ID]
        if RECORD_HEADER in headers and step != "break":
            choice = {"index": 0, "token_ids": [5, 6, 7, 8], "logprobs": {"token_logprobs": [-0.5] * 4}, "finish_reason": "stop"}
            choice["weight_versions"] = [{"version": self.label, "start": 0, "end": 4}]
            if self.experts is not None:
                choice["routed_experts"] = self.experts
            call = {"prompt_token_ids": [1, 2], "choices": [choice], **self.sampling}
            self.table.put(name, [call], logprobs="processed_logprobs")
        own = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        if body.get("stream"):
            await send_start(send, 200, {"content-type": "text/event-stream"})
            for number, word in enumerate(ANSWER.split()):
                if step == "break" and number == 2:
                    _abort(send)
                    return
                event = {**own, "choices": [{"index": 0, "delta": {"content": f"{word} "}, "finish_reason": None}]}
                await send({"type": "http.response.body", "body": b"data: " + json.dumps(event).encode() + b"\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
            return
        message = {"role": "assistant", "content": ANSWER}
        answer = {**own, "object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        data = json.dumps(answer).encode()
        await send_start(send, 200, {"content-type": "application/json", "content-length": str(len(data))})
        await send({"type": "http.response.body", "body": data[:20], "more_body": True})
        if step == "break":
            _abort(send)
            return
        await send({"type": "http.response.body", "body": data[20:]})
