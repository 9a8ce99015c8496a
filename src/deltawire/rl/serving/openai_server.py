"""A small OpenAI-compatible server over a transformers model that follows a chain, for small models, tests and demos.

It has real sampling, streaming, log-probs and tool calls, swaps weights between two forward passes, and knows the version of every token
exactly. It keeps its answers for gateways (`engines.answer_table`). Large models belong into vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from ...addresses import listening_socket
from ...chain.reader_options import ReaderOptions
from ...engines.answer_table import ANSWERS_ROUTE, ENGINE_ROUTE, RECORD_HEADER, REQUEST_ID, AnswerTable
from ...errors import EngineError, EnginesAway, GatewayError, ModelUnknown, RequestMalformed
from ...events import OnEvent
from ...gateway.http.bodies import (
    Headers,
    Receive,
    Scope,
    Send,
    dump,
    error_body,
    headers_of,
    parse_object,
    read_body,
    send_bytes,
    send_json,
    send_start,
    until_gone,
)
from ...gateway.http.http_server import listen
from ...gateway.http.requests import ROUTES
from ...store.copies.locations import Location
from ..generation import TransformersGenerator
from .batch_server import BatchServer, DrawnToken, WantedCompletion
from .openai_shapes import Wanted, choice_body, logprobs_body, output_items, read_wanted, response_object, usage

SERVED = "the model"
"""The thing that is served, for the message when the address cannot be used."""
_MOST_BODY = 16 << 20
_LONGEST_NAME = 100
_PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_"}


class OpenAiServer:
    """An ASGI application that answers with a model that follows a chain.

    Parameters
    ----------
    generator
        The model. Its `start` was called.
    name
        The name of the model for callers.
    most
        The most completions that are drawn at the same time.
    """

    def __init__(self, generator: TransformersGenerator, *, name: str = "policy", most: int = 32) -> None:
        self._generator, self._name = generator, name
        self._batches = BatchServer(generator.model, generator.forward_pass, generator.stop_tokens, most=most)
        self._batches.start()
        self.table = AnswerTable()
        """The answers that are kept for gateways."""
        self._context = int(getattr(generator.model.config, "max_position_embeddings", 2048))

    def close(self) -> None:
        """Stop drawing."""
        self._batches.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = headers_of(scope)
        path = str(scope["path"])
        try:
            if path in ROUTES and scope["method"] == "POST":
                await self._answer(ROUTES[path], headers, receive, send)
            elif scope["method"] == "GET":
                await self._tell(path, scope.get("query_string", b""), send)
            else:
                await send_json(send, {"error": "there is no such route"}, status=404)
        except GatewayError as error:
            await send_json(send, error_body(error), status=error.status)

    async def _tell(self, path: str, query: bytes, send: Send) -> None:
        version = self._generator.version
        if path == ENGINE_ROUTE:
            label = None if version is None else str(version.seq)
            state = {"deltawire": "engine", "version": 1, "label": label, "running": label is not None, "logprobs": "processed_logprobs"}
            await send_json(send, state)
        elif path.startswith(ANSWERS_ROUTE) and (answer := self.table.reply(path, query)) is not None:
            await send_bytes(send, answer, "application/json")
        elif path == "/health":
            await send_json(send, {}, status=200 if version is not None else 503)
        elif path == "/v1/models":
            card = {"id": self._name, "object": "model", "created": 0, "owned_by": "deltawire", "max_model_len": self._context}
            await send_json(send, {"object": "list", "data": [card]})
        else:
            await send_json(send, {"error": "there is no such route or answer"}, status=404)

    async def _answer(self, route: str, headers: Headers, receive: Receive, send: Send) -> None:
        body = parse_object(await read_body(receive, headers, _MOST_BODY))
        if body.get("model") not in (None, "", self._name):
            raise ModelUnknown(f"this server has no model {str(body['model'])[:_LONGEST_NAME]!r}. It has {self._name!r}.")
        wanted = read_wanted(route, body)
        name = headers.get(REQUEST_ID) or uuid.uuid4().hex
        answer = _Answer(self, route, wanted, name, self._name)
        answer.is_recorded = RECORD_HEADER in headers
        answer.shows_usage = isinstance(options := body.get("stream_options"), dict) and options.get("include_usage") is True
        rows = answer.rows = await asyncio.to_thread(self._rows, answer)
        self._batches.add(rows)
        gone = asyncio.ensure_future(until_gone(receive))
        work = asyncio.ensure_future(answer.stream(send) if wanted.stream else answer.whole(send))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            for row in rows:
                row.is_cancelled = True
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    def _rows(self, answer: _Answer) -> list[WantedCompletion]:
        wanted = answer.wanted
        prompts = self._generator.prompts
        answer.tokenizer = prompts.tokenizer
        rows = []
        for prompt in wanted.prompts:
            try:
                if wanted.tools and isinstance(prompt, list) and isinstance(prompt[0], dict):
                    ids = prompts.tokenizer.apply_chat_template(
                        prompt, tools=wanted.tools, add_generation_prompt=True, tokenize=True, return_dict=False
                    )
                else:
                    (ids,) = prompts.encode([{"prompt": prompt}])
            except EngineError as error:
                raise RequestMalformed(str(error)) from None
            except Exception as error:  # a chat template may refuse a conversation, and the tokenizer may refuse content other than text
                is_told = type(error).__module__.startswith("jinja2")
                reason = f"{error}" if is_told else "each needs a role, and a content that the template takes, such as a text"
                raise RequestMalformed(f"the chat template cannot use these messages: {reason}.") from None
            room = self._context - len(ids)
            size = self._generator.model.config.vocab_size
            if room < 1 or not all(0 <= token < size for token in ids):
                raise RequestMalformed(f"the prompt has {len(ids):,} tokens, or unknown ones; the model takes {self._context:,}.")
            answer.prompts.append(list(ids))
            for _ in range(wanted.choices):
                number = len(answer.choices)
                answer.choices.append([])
                limit = min(room, wanted.max_tokens or room)
                seed = None if wanted.seed is None else wanted.seed + number
                rows.append(WantedCompletion(ids, limit, wanted.temperature, wanted.top_p, seed, answer.receiver(number)))
        return rows


class _Answer:
    """One answer that is being made."""

    def __init__(self, server: OpenAiServer, route: str, wanted: Wanted, name: str, model: str) -> None:
        self._server, self.route, self.wanted, self._key, self._model = server, route, wanted, name, model
        self._id = _PREFIXES[route] + name
        self._created = int(time.time())
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[tuple[int, DrawnToken | Exception]] = asyncio.Queue()
        self.prompts: list[list[int]] = []
        self.choices: list[list[DrawnToken]] = []
        self.tokenizer: Any = None
        self.shows_usage = False
        self.is_recorded = False
        self.rows: list[WantedCompletion] = []
        self._stopped: dict[int, str] = {}

    def receiver(self, number: int) -> Any:
        """Return the function that takes the tokens of a choice, on any thread."""

        def receive(drawn: DrawnToken | Exception) -> None:
            try:
                self._loop.call_soon_threadsafe(self._arrived.put_nowait, (number, drawn))
            except RuntimeError:  # the loop has ended, so nobody waits
                return

        return receive

    async def _texts(self) -> AsyncIterator[tuple[int, str, DrawnToken]]:
        """Yield each token with the text that it adds, until all choices have ended."""
        shown = [0] * len(self.choices)
        left = len(self.choices)
        while left:
            number, drawn = await self._arrived.get()
            if isinstance(drawn, Exception):
                raise EnginesAway(str(drawn))
            if number in self._stopped:
                continue  # it was drawn before the completion was cancelled
            self.choices[number].append(drawn)
            text = self.text(number)
            if number in self._stopped:
                self.rows[number].is_cancelled = True
                drawn = self.choices[number][-1] = replace(drawn, finish="stop")
            left -= drawn.finish is not None
            if text.endswith("�") and drawn.finish is None:
                text = text[: shown[number]]  # the next token may complete the character
            new, shown[number] = text[shown[number] :], len(text)
            yield number, new, drawn
        if self.is_recorded:
            self._keep()

    def text(self, number: int) -> str:
        """Return the text of a choice so far, without what a stop text cuts off."""
        text = str(self.tokenizer.decode([each.token for each in self.choices[number]], skip_special_tokens=True))
        cuts = [at for stop in self.wanted.stop if (at := text.find(stop)) >= 0]
        if cuts:
            self._stopped[number] = "stop"
        return text[: min(cuts)] if cuts else text

    def _finish(self, number: int) -> str:
        return self._stopped.get(number, self.choices[number][-1].finish or "stop")

    def _keep(self) -> None:
        """Keep what was drawn, for gateways."""
        calls = []
        for number, prompt in enumerate(self.prompts):
            first = number * self.wanted.choices
            chosen = [_kept(index, self.choices[first + index]) for index in range(self.wanted.choices)]
            sampling = {"temperature": self.wanted.temperature, "top_p": self.wanted.top_p, "changed_by": []}  # it reads no others
            calls.append({"request_id": f"{self._id}-{number}", "prompt_token_ids": prompt, "choices": chosen, **sampling})
        self._server.table.put(self._key, calls, logprobs="processed_logprobs")

    def _counted(self) -> dict[str, Any]:
        return usage(self.route, sum(map(len, self.prompts)), sum(map(len, self.choices)))

    def _logprobs(self, drawn: list[DrawnToken]) -> Any:
        if not self.wanted.logprobs:
            return None
        return logprobs_body(self.route, [str(self.tokenizer.decode([each.token])) for each in drawn], [each.logprob for each in drawn])

    async def whole(self, send: Send) -> None:
        """Send the answer when it is complete."""
        async for _ in self._texts():
            pass
        if self.route == "responses":
            await send_json(send, self._response(self.text(0)))
            return
        listed = [
            choice_body(self.route, number, self.text(number), self._finish(number), self._logprobs(drawn), bool(self.wanted.tools))
            for number, drawn in enumerate(self.choices)
        ]
        kind = "chat.completion" if self.route == "chat" else "text_completion"
        own = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        await send_json(send, {**own, "choices": listed, "usage": self._counted()})

    async def stream(self, send: Send) -> None:
        """Send the answer as server-sent events."""
        events = self._response_events() if self.route == "responses" else self._chunks()
        first = await anext(events)
        await send_start(send, 200, {"content-type": "text/event-stream; charset=utf-8"})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except GatewayError as error:
            await send({"type": "http.response.body", "body": b"data: " + dump(error_body(error)) + b"\n\n"})
            return
        await send({"type": "http.response.body", "body": b""})

    async def _chunks(self) -> AsyncIterator[bytes]:
        is_chat = self.route == "chat"
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        own = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        begun: set[int] = set()
        async for number, text, drawn in self._texts():
            choices: list[dict[str, Any]] = []
            blank = {"index": number, "logprobs": None, "finish_reason": None}
            if is_chat and number not in begun:
                begun.add(number)
                choices.append({**blank, "delta": {"role": "assistant", "content": ""}})
            logprobs = self._logprobs([drawn])
            if is_chat and self.wanted.tools:
                if drawn.finish is not None:
                    message = choice_body("chat", number, self.text(number), self._finish(number), None, True)
                    calls = [{"index": index, **call} for index, call in enumerate(message["message"].get("tool_calls", ()))]
                    delta = {"content": message["message"]["content"], **({"tool_calls": calls} if calls else {})}
                    choices.append({**blank, "delta": delta})
                    choices.append({**blank, "delta": {}, "finish_reason": message["finish_reason"]})
            else:
                inner = {"delta": {"content": text}} if is_chat else {"text": text}
                finish = self._finish(number) if drawn.finish is not None else None
                choices.append({**blank, **inner, "logprobs": logprobs, "finish_reason": finish})
            for choice in choices:
                yield b"data: " + dump({**own, "choices": [choice]}) + b"\n\n"
        if self.shows_usage:
            yield b"data: " + dump({**own, "choices": [], "usage": self._counted()}) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _response(self, text: str) -> dict[str, Any]:
        status = "completed" if self._finish(0) == "stop" else "incomplete"
        items = output_items(self._key, text, bool(self.wanted.tools))
        return response_object(self._id, self._created, self._model, status, items, self._counted(), self.wanted.tools)

    async def _response_events(self) -> AsyncIterator[bytes]:
        number = 0

        def event(kind: str, **fields: Any) -> bytes:
            nonlocal number
            data = dump({"type": kind, "sequence_number": number, **fields})
            number += 1
            return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

        begun = response_object(self._id, self._created, self._model, "in_progress", [], None, self.wanted.tools)
        part_of = {"item_id": f"msg_{self._key}", "output_index": 0, "content_index": 0}
        yield event("response.created", response=begun)
        item = {**output_items(self._key, "", False, "in_progress")[0], "content": []}
        yield event("response.output_item.added", output_index=0, item=item)
        yield event("response.content_part.added", **part_of, part={"type": "output_text", "text": "", "annotations": []})
        async for _, text, _ in self._texts():
            if text:
                yield event("response.output_text.delta", **part_of, delta=text, logprobs=[])
        whole = self._response(self.text(0))
        item = whole["output"][0]
        yield event("response.output_text.done", **part_of, text=item["content"][0]["text"], logprobs=[])
        yield event("response.content_part.done", **part_of, part=item["content"][0])
        yield event("response.output_item.done", output_index=0, item=item)
        yield event("response.completed" if whole["status"] == "completed" else "response.incomplete", response=whole)


def _kept(index: int, drawn: list[DrawnToken]) -> dict[str, Any]:
    spans: list[dict[str, Any]] = []
    for number, each in enumerate(drawn):
        if spans and spans[-1]["version"] == str(each.seq):
            spans[-1]["end"] = number + 1
        else:
            spans.append({"version": str(each.seq), "start": number, "end": number + 1})
    logprobs = {"token_logprobs": [each.logprob for each in drawn]}
    finish = drawn[-1].finish if drawn else "stop"
    return {
        "index": index,
        "token_ids": [each.token for each in drawn],
        "logprobs": logprobs,
        "finish_reason": finish,
        "weight_versions": spans,
    }


def serve_openai(
    url: Location,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    name: str = "policy",
    device: str = "cpu",
    reading: ReaderOptions | None = None,
    poll: float = 0.5,
    stop: threading.Event | None = None,
    on_ready: Callable[[str], Any] | None = None,
    on_event: OnEvent | None = None,
    listening: socket.socket | None = None,
) -> None:
    """Serve the model of a chain until `stop` is set. It answers when it has the first version. Raises `AddressUnavailable`.

    Parameters
    ----------
    url
        The location of the chain, or an open store.
    host
        The address to listen on. The default can be reached from this machine only.
    port
        The port; 0 takes a free one.
    name
        The name of the model for callers.
    device
        The device of the model, such as "cpu" or "cuda".
    reading
        Which chain to accept, which channel to follow, and how to read it.
    poll
        Seconds between two looks for a new version.
    stop
        Set this event to end serving.
    on_ready
        Called with the address of the server when it accepts requests.
    on_event
        Called with each event of the engine.
    listening
        A socket that has this address already, from `deltawire.addresses.listening_socket`. It is closed at the end.
    """
    reading = reading or ReaderOptions()
    with contextlib.ExitStack() as stack:
        # The port comes first, because the model takes a while.
        bound = stack.enter_context(listening_socket(SERVED, host, port) if listening is None else listening)
        store = reading.open_store(url, on_event=on_event)
        if store is not url:
            stack.callback(store.close)
        generator = TransformersGenerator(store, device=device, options=reading, poll=poll, on_event=on_event)
        generator.start()
        stack.callback(generator.close)
        server = OpenAiServer(generator, name=name)
        stack.callback(server.close)
        told = on_ready or (lambda address: None)
        asyncio.run(listen(server, host, port, stop or threading.Event(), told, what=SERVED, listening=bound))
