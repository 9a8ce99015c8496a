"""Reads what a caller got: the text of each choice, refusals and tool calls. It decides only what monitors count and what people read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...format.interactions import AnswerFacts
from ..http.event_stream import EventSplitter, event_value

_REFUSING = (
    "i can't",
    "i cannot",
    "i can’t",
    "i'm sorry, but",
    "i’m sorry, but",
    "i am sorry, but",
    "i'm unable",
    "i won't",
    "i am unable",
)

_PROMPTS = ("messages", "input", "prompt")
_TEXT_FIELDS = frozenset({"role", "content", "type", "id", "status"})
"""`request_messages` and `ChoiceText.text` show everything of a message that has only these fields."""
_TEXT_KINDS = ("text", "input_text", "output_text", "refusal", "thinking", "reasoning_text", "summary_text")
_LONGEST_KIND = 40
_MORE = (
    "tools",
    "functions",
    "instructions",
    "previous_response_id",
    "previous_input_messages",
    "conversation",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "prompt_embeds",
    "suffix",
)
"""Fields of a request, besides its messages, that its prompt may be made of."""

_CUTTING = ("stop", "stop_token_ids")
"""Fields of a request that let an engine leave text of its tokens out of the answer: the text at which it stops, and what follows it."""


@dataclass(slots=True)
class ChoiceText:
    """The text of one choice, and its tool calls."""

    text: str = ""
    refused: bool = False
    finish: str | None = None
    calls: dict[int, list[str]] = field(default_factory=dict)
    """The name and the arguments of each tool call."""
    has_more: bool = False
    """Whether the answer has something that is not in `text`, such as a tool call, reasoning, a refusal, or a part that cannot be read."""

    def facts(self, length: int, tools: frozenset[str]) -> AnswerFacts:
        """Return what monitors count. A tool call is valid if the request has the tool, and the arguments are a JSON object."""
        good = sum(name in tools and _is_object(arguments) for name, arguments in self.calls.values())
        refused = self.refused or self.text.lstrip().lower().startswith(_REFUSING)
        return AnswerFacts(length, refused, good, len(self.calls) - good)


def read_answer(route: str, copies: Sequence[bytes]) -> dict[int, ChoiceText]:
    """Return the choices of an answer by their indexes. Whatever cannot be read is left out.

    Parameters
    ----------
    route
        "chat", "completions" or "responses".
    copies
        The bytes that were sent to the caller.
    """
    found: dict[int, ChoiceText] = {}
    is_unread = False
    for value in _values(b"".join(copies)):
        try:
            if route == "responses":
                _read_response(value, found)
            else:
                _read_choices(value, found)
        except (AttributeError, TypeError, KeyError, ValueError, OverflowError):  # another form than OpenAI's
            is_unread = True
    for one in found.values():
        one.has_more |= is_unread
    return found


def tool_names(body: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the tools that a request offers."""
    names: set[str] = set()
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            inner = tool.get("function")
            name = inner.get("name") if isinstance(inner, dict) else tool.get("name")
            if isinstance(name, str):
                names.add(name)
    return frozenset(names)


def request_messages(body: Mapping[str, Any], number: int = 0) -> list[tuple[str, str]]:
    """Return the conversation of a request as (role, text).

    Parameters
    ----------
    body
        The body of the request.
    number
        The number of the prompt, if the request has several.
    """
    prompt = _prompt(body, number)
    if isinstance(prompt, str):
        return [("user", prompt)]
    if not isinstance(prompt, list):
        return []
    messages = [each for each in prompt if isinstance(each, dict)]
    return [(str(each.get("role", "user")), _content(each.get("content"))) for each in messages]


def other_parts(body: Mapping[str, Any]) -> list[str]:
    """Return the kinds of parts of the prompt that token ids do not contain, such as images and audio."""
    found = {"prompt_embeds"} if body.get("prompt_embeds") else set[str]()
    for name in _PROMPTS:
        prompt = body.get(name)
        for message in prompt if isinstance(prompt, list) else ():
            for parts in (message.get("content"), message.get("output")) if isinstance(message, dict) else ():
                found.update(_kind(part) for part in (parts if isinstance(parts, list) else ()) if not _is_text_kind(part))
    return sorted(found)


def _is_text_kind(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and (part.get("type") in _TEXT_KINDS or part.keys() == {"text"}))


def _kind(part: Any) -> str:
    names = [part.get("type"), *part] if isinstance(part, dict) else []
    return next((name for name in names if isinstance(name, str) and name), "unknown")[:_LONGEST_KIND]


def is_all_text(body: Mapping[str, Any], number: int = 0) -> bool:
    """Return whether the conversation and the answer show all text of the tokens. The parameters are those of `request_messages`.

    The conversation is what `request_messages` returns. The request may ask for an answer that leaves out what the model wrote.
    """
    if any(body.get(name) for name in _CUTTING) or body.get("include_reasoning", True) is not True:
        return False
    if any(body.get(name) for name in _MORE) or sum(body.get(name) is not None for name in _PROMPTS) != 1:
        return False
    prompt = _prompt(body, number)
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and all(map(_is_text_message, prompt)))


def _prompt(body: Mapping[str, Any], number: int) -> Any:
    prompt = body.get("messages", body.get("input", body.get("prompt")))
    if isinstance(prompt, list) and number < len(prompt) and isinstance(prompt[number], str):
        return prompt[number]
    return prompt


def _is_text_message(message: Any) -> bool:
    if not isinstance(message, dict) or any(value for name, value in message.items() if name not in _TEXT_FIELDS):
        return False
    return _is_text(message.get("content"))


def _is_text(content: Any) -> bool:
    """Return whether `_content` gives all of a content."""
    return all(map(_is_text_part, content)) if isinstance(content, list) else isinstance(content, str)


def _is_text_part(part: Any) -> bool:
    is_text = isinstance(part, dict) and isinstance(part.get("text"), str)
    return is_text and not any(value for name, value in part.items() if name not in ("type", "text"))


def _values(data: bytes) -> Iterable[Any]:
    if data.lstrip()[:1] == b"{":
        try:
            yield json.loads(data)
        except (ValueError, RecursionError):
            return
    else:
        for event in EventSplitter().feed(data + b"\n\n"):
            if isinstance(value := event_value(event), dict):
                yield value


def _read_choices(value: Mapping[str, Any], found: dict[int, ChoiceText]) -> None:
    for choice in value.get("choices") or ():
        one = found.setdefault(int(choice.get("index", 0)), ChoiceText())
        one.finish = choice.get("finish_reason") or one.finish
        message = choice.get("message") or choice.get("delta") or {}
        content = choice.get("text") or message.get("content")
        one.has_more |= any(value for name, value in message.items() if name not in _TEXT_FIELDS) or not _is_text(content or "")
        one.text += _content(content)
        one.refused |= bool(message.get("refusal"))
        for number, call in enumerate(message.get("tool_calls") or ()):
            parts = one.calls.setdefault(int(call.get("index", number)), ["", ""])
            parts[0] += str(call["function"].get("name") or "")
            parts[1] += str(call["function"].get("arguments") or "")


def _read_response(value: Mapping[str, Any], found: dict[int, ChoiceText]) -> None:
    if "type" in value and value["type"] not in ("response.completed", "response.incomplete"):
        return
    response = value.get("response", value)
    one = found[0] = ChoiceText()
    for item in response.get("output") or ():
        parts = item.get("content") or () if item.get("type") == "message" else (item,)
        one.has_more |= any(part.get("type") not in ("output_text", "text") for part in parts)
        if item.get("type") == "function_call":
            one.calls[len(one.calls)] = [str(item.get("name")), str(item.get("arguments"))]
        elif item.get("type") == "message":
            one.text += _content(item.get("content"))
            one.refused |= any(part.get("type") == "refusal" for part in item.get("content") or ())
    one.finish = "length" if response.get("status") == "incomplete" else "stop"


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
