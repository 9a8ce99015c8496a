"""A middleware of the vLLM server that keeps what the engine drew for each answer: `--middleware deltawire.engines.vllm.AnswerRecorder`.

vLLM's OpenAI routes do not report which weights made which token. This middleware runs in the server process and wraps the method through
which all of these routes generate, so it sees the token ids, log-probs, labels and experts of every answer. Answers themselves do not
change. answer_table.py describes the routes that it adds.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from ..answer_table import ANSWERS_ROUTE, ENGINE_ROUTE, RECORD_HEADER, REQUEST_ID, AnswerTable, has_key
from ..sampling_changes import NAMES, changed_by

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_current: ContextVar[_Recording | None]


class AnswerRecorder:
    """Keeps the answers to requests that have the headers `X-Request-Id` and `x-deltawire-record`.

    vLLM makes it from its name: start the server with `--middleware deltawire.engines.vllm.answer_recorder.AnswerRecorder`. Use
    `--logprobs-mode processed_logprobs` as well, so that log-probs belong to the distribution that tokens were drawn from.

    Parameters
    ----------
    app
        The application of the server.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._table = AnswerTable()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = str(scope["path"])
        if path == ENGINE_ROUTE or path.startswith(ANSWERS_ROUTE):
            await self._tell(scope, path, headers.get("authorization"), send)
            return
        name = headers.get(REQUEST_ID)
        if name is None or RECORD_HEADER not in headers or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        client = scope["app"].state.engine_client
        _wrap(client)
        token = _current.set(_Recording(name, self._table, client))
        try:
            await self._app(scope, receive, send)
        finally:
            _current.reset(token)

    async def _tell(self, scope: _Scope, path: str, authorization: str | None, send: _Send) -> None:
        state = scope["app"].state
        if not has_key(authorization, _keys(state.args)):
            await _send(send, 401, b'{"error":"Unauthorized"}')
        elif path == ENGINE_ROUTE:
            await _send(send, 200, json.dumps(await _state(state)).encode())
        elif (answer := self._table.reply(path, scope.get("query_string", b""))) is None:
            await _send(send, 404, b'{"error":"this server keeps no answer with that id"}')
        else:
            await _send(send, 200, answer)


def _keys(args: Any) -> list[str]:
    """Return the keys of the server. As in vLLM, the variable VLLM_API_KEY counts if no key is on the command line."""
    return [key for key in getattr(args, "api_key", None) or (os.environ.get("VLLM_API_KEY"),) if key]


async def _state(state: Any) -> dict[str, Any]:
    client = state.engine_client
    return {
        "deltawire": "engine",
        "version": 1,
        "label": str(await client.get_weight_version()),
        "running": not await client.is_paused(),
        "logprobs": str(client.model_config.logprobs_mode),
    }


async def _send(send: _Send, status: int, data: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


class _Recording:
    """The tokens that the engine draws for one request, which may have several prompts."""

    def __init__(self, name: str, table: AnswerTable, client: Any) -> None:
        mode = client.model_config.logprobs_mode
        self._name, self._table, self._mode = name, table, None if mode is None else str(mode)
        self._client = client
        self._calls: list[dict[str, Any]] = []

    def begin(self, request_id: str, params: Any, prompt: Any = None, adapter: Any = None) -> _Call:
        """Return the object that keeps what one call of `generate` draws."""
        changes = self._changed_by(params)
        if not _is_tokens(prompt):
            changes.append("images, audio or embeddings")  # token ids do not contain them
        if adapter is not None:  # the label of the weights is that of the model without it
            changes.append("a LoRA adapter")
        sampling = {"temperature": params.temperature, "top_p": params.top_p, "changed_by": changes}
        call: dict[str, Any] = {"request_id": request_id, "prompt_token_ids": None, "choices": [], **sampling}
        self._calls.append(call)
        return _Call(call, self)

    def _changed_by(self, params: Any) -> list[str]:
        """Return which parameters, of the request or of the server, change what is drawn, besides the temperature and top_p."""
        used = {name: getattr(params, name, None) for name in NAMES}
        if getattr(getattr(self._client, "vllm_config", None), "watermark_config", None) is None:
            used["watermarking"] = None
        elif used["watermarking"] is None:
            used["watermarking"] = True  # the server's own choice
        used["logits_processors"] = getattr(self._client.model_config, "logits_processors", None)
        return changed_by(used)

    def keep(self) -> None:
        """Put everything that is complete into the table."""
        if all(call["choices"] and call["prompt_token_ids"] is not None for call in self._calls):
            self._table.put(self._name, self._calls, logprobs=self._mode)


class _Call:
    def __init__(self, call: dict[str, Any], recording: _Recording) -> None:
        self._call, self._recording = call, recording
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, out: Any, *, is_delta: bool) -> None:
        """Add an output of the engine."""
        if out.prompt_token_ids is not None:
            self._call["prompt_token_ids"] = list(out.prompt_token_ids)
        for each in out.outputs:
            choice = self._choices.setdefault(each.index, {"index": each.index, "token_ids": [], "logprobs": {"token_logprobs": []}})
            tokens = [int(token) for token in each.token_ids]
            drawn = [float(row[token].logprob) for row, token in zip(each.logprobs or (), tokens, strict=False)]
            if is_delta:
                choice["token_ids"] += tokens
                choice["logprobs"]["token_logprobs"] += drawn
            else:
                choice["token_ids"], choice["logprobs"]["token_logprobs"] = tokens, drawn
            if each.finish_reason is not None:
                spans = None if each.weight_versions is None else [_plain(span) for span in each.weight_versions]
                choice |= {"finish_reason": str(each.finish_reason), "weight_versions": spans, "routed_experts": _experts(each)}
        if out.finished:
            self._call["choices"] = [self._choices[index] for index in sorted(self._choices)]
            self._recording.keep()


def _is_tokens(prompt: Any) -> bool:
    """Return whether the token ids of a prompt are all of it. vLLM's routes give prompts as a dict with their kind."""
    if not isinstance(prompt, dict):
        return True
    has_more = any(prompt.get(name) is not None for name in ("multi_modal_data", "mm_kwargs", "prompt_embeds"))
    return prompt.get("type", "token") in ("token", "text") and not has_more


def _plain(span: Any) -> dict[str, Any]:
    return {"version": str(span.version), "start": int(span.start), "end": int(span.end)}


def _experts(output: Any) -> str | None:
    if output.routed_experts is None:
        return None
    from vllm.utils.serial_utils import numpy2base64

    return str(numpy2base64(output.routed_experts))


def _wrap(client: Any) -> None:
    """Let the engine client report what it draws. Only the first call changes it."""
    if getattr(client, "deltawire_records", False):
        return
    from vllm.sampling_params import RequestOutputKind

    generate = client.generate

    async def recorded(prompt: Any, sampling_params: Any, *rest: Any, **options: Any) -> AsyncIterator[Any]:
        recording = _current.get()
        if recording is None:
            async for out in generate(prompt, sampling_params, *rest, **options):
                yield out
            return
        if sampling_params.logprobs is None:
            sampling_params.logprobs = 0  # the log-prob of the drawn token; routes show log-probs only to callers who asked for them
        name = str(rest[0] if rest else options.get("request_id"))
        call = recording.begin(name, sampling_params, prompt, options.get("lora_request"))
        is_delta = sampling_params.output_kind is RequestOutputKind.DELTA
        async for out in generate(prompt, sampling_params, *rest, **options):
            call.add(out, is_delta=is_delta)
            yield out

    client.generate = recorded
    client.deltawire_records = True


_current = ContextVar("deltawire_recording", default=None)
