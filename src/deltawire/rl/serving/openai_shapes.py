"""The bodies of OpenAI's routes, for the small server: what a request asks for, and the forms of answers. Nothing here does I/O."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from ...errors import RequestMalformed

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_MOST_PROMPTS, _MOST_CHOICES = 64, 16
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of parts that are texts, and the field that has the text."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The contents of a request.

    Parameters
    ----------
    prompts
        Rows for the tokenizer: a text, messages or token ids each.
    choices
        The number of completions of each prompt.
    max_tokens
        The most tokens of a completion. None: as many as the model can.
    temperature, top_p, seed
        How tokens are drawn.
    stop
        Texts that end a completion, which are not part of it.
    stream
        Whether the answer is streamed.
    logprobs
        Whether the answer has log-probs.
    tools
        The tools that the model may call.
    """

    prompts: list[Any]
    choices: int
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    logprobs: bool
    tools: list[Any]


def read_wanted(route: str, body: Mapping[str, Any]) -> Wanted:
    """Read a request. Raises `RequestMalformed`."""
    if route == "chat":
        prompts = [_messages(body.get("messages"))]
    elif route == "responses":
        instructions = body.get("instructions")
        given = body.get("input")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
        prompts = [[{"role": "system", "content": instructions}, *messages] if isinstance(instructions, str) else messages]
    else:
        prompts = _prompts(body.get("prompt"))
    limits = [body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")]
    limit = next((each for each in limits if each is not None), 16 if route == "completions" else None)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise RequestMalformed("the limit of tokens must be a whole number above 0.")
    choices, seed = 1 if body.get("n") is None else body["n"], body.get("seed")
    if type(choices) is not int or not 1 <= choices <= _MOST_CHOICES:
        raise RequestMalformed(f"n must be a whole number from 1 to {_MOST_CHOICES}.")
    if seed is not None and type(seed) is not int:
        raise RequestMalformed("seed must be a whole number.")
    if not isinstance(body.get("stream"), (bool, NoneType)):
        raise RequestMalformed("stream must be true or false.")
    temperature, top_p = _number(body, "temperature", 0.0, 100.0), _number(body, "top_p", 0.0, 1.0)
    stop = body.get("stop") or []
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else None
    if stop is None or not all(isinstance(each, str) and each for each in stop) or len(stop) > 16:
        raise RequestMalformed("stop must be a text, or a list of at most 16 texts.")
    if top_p == 0:
        raise RequestMalformed("top_p must be above 0.")
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise RequestMalformed("tools must be a list.")
    has_logprobs = body.get("logprobs") is not None and body["logprobs"] is not False  # 0 asks for them
    return Wanted(prompts, choices, limit, temperature, top_p, seed, stop, body.get("stream") is True, has_logprobs, tools)


def _number(body: Mapping[str, Any], name: str, least: float, most: float) -> float:
    value = body.get(name)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not least <= value <= most:
        raise RequestMalformed(f"{name} must be a number from {least:g} to {most:g}.")
    return float(value)


def _messages(found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in found):
        raise RequestMalformed("the conversation must be a list of messages with a role.")
    messages = []
    for each in found:
        content = each.get("content")
        if isinstance(content, list):
            content = "".join(map(_text_of, content))
        if not isinstance(content, (str, NoneType)):
            raise RequestMalformed("the content of a message must be a text, or a list of texts.")
        messages.append({**each, "content": content or ""})  # a message with tool calls may have none
    return messages


def _text_of(part: Any) -> str:
    """Return the text of a part of a message."""
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise RequestMalformed("this server takes only texts in messages, and no images, audio or files.")
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise RequestMalformed(f"a part of a message has the type {kind!r}, but no text.")
    return text


def _prompts(found: Any) -> list[Any]:
    if isinstance(found, str) or (isinstance(found, list) and found and all(type(each) is int for each in found)):
        return [found]
    if not isinstance(found, list) or not 1 <= len(found) <= _MOST_PROMPTS:
        raise RequestMalformed(f"prompt must be a text, token ids, or a list of 1 to {_MOST_PROMPTS} of them.")
    if not all(isinstance(each, str) or (isinstance(each, list) and all(type(one) is int for one in each)) for each in found):
        raise RequestMalformed("each prompt must be a text or a list of token ids.")
    return list(found)


def split_tools(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text of an answer without its tool calls, and the tool calls, in the form that Qwen and Hermes models write."""
    calls = []
    for number, inner in enumerate(_TOOL_CALL.findall(text)):
        try:
            found = json.loads(inner)
            name, arguments = str(found["name"]), json.dumps(found.get("arguments", {}))
        except (ValueError, KeyError, TypeError):
            name, arguments = "", inner
        calls.append(
            {"index": number, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": arguments}}
        )
    return _TOOL_CALL.sub("", text).strip() if calls else text, calls


def usage(route: str, prompt: int, completion: int) -> dict[str, Any]:
    """Return the number of tokens of a request."""
    if route == "responses":
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {"input_tokens": prompt, "output_tokens": completion, "total_tokens": prompt + completion, **details}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def choice_body(route: str, index: int, text: str, finish: str, logprobs: Any, tools: bool) -> dict[str, Any]:
    """Return a whole choice of an answer."""
    if route == "completions":
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
    content, calls = split_tools(text) if tools else (text, [])
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": "tool_calls" if calls else finish}


def logprobs_body(route: str, tokens: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    """Return log-probs in the form of a route."""
    if route == "completions":
        return {"tokens": list(tokens), "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": []}
    return {
        "content": [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
    }


def response_object(name: str, created: int, model: str, status: str, output: list[Any], counted: Any, tools: list[Any]) -> dict[str, Any]:
    """Return the object of OpenAI's responses route."""
    own = {"id": name, "object": "response", "created_at": created, "status": status, "model": model, "output": output, "usage": counted}
    rest = {"error": None, "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None, "instructions": None}
    return {
        **own,
        **rest,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": tools,
        "temperature": None,
        "top_p": None,
    }


def output_items(name: str, text: str, has_tools: bool, status: str = "completed") -> list[dict[str, Any]]:
    """Return the output of a response: a message, and tool calls."""
    content, calls = split_tools(text) if has_tools else (text, [])
    part = {"type": "output_text", "text": content, "annotations": []}
    items: list[dict[str, Any]] = [{"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [part]}]
    for call in calls:
        inner = call["function"]
        items.append({"id": f"fc_{call['id']}", "type": "function_call", "status": "completed", "call_id": call["id"], **inner})
    return items
