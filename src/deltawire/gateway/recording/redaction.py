"""Asks the user's function for redaction, and checks what it returns."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import RequestMalformed
from ..http.requests import check_tags
from ..options import Redact


class RedactionFailed(Exception):
    """The function for redaction failed, or returned something unusable. The text says which function it is, and where it failed."""


def redacted(function: Redact, shown: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what the function lets the gateway record of an answer, or None for nothing. Raises `RedactionFailed`.

    Parameters
    ----------
    function
        The user's function.
    shown
        The conversation, the answer and what is known about it. The function may change it.
    """
    try:
        found: Any = function(shown)
    except Exception as error:
        raise RedactionFailed(f"the function {_name(function)} of --redact failed{_place(function, error)}: {error!r:.300}") from error
    if (problem := _problem(found)) is not None:
        raise RedactionFailed(f"the function {_name(function)} of --redact returned {problem}")
    return found  # type: ignore[no-any-return]


def _problem(found: Any) -> str | None:
    """Return what is wrong with the value of the function, or None."""
    if found is None:
        return None
    if not isinstance(found, Mapping):
        return f"a {type(found).__name__}, not what it was given or None"
    if missing := [name for name in ("messages", "answer", "tags") if name not in found]:
        return f"a dict without {missing[0]!r}"
    messages = found["messages"]
    if not isinstance(messages, Sequence) or not all(_is_message(each) for each in messages):
        return "messages that are not a list of dicts with 'role' and 'content' as text"
    if not isinstance(found["answer"], str):
        return f"an answer that is a {type(found['answer']).__name__}, not text"
    try:
        check_tags(found["tags"], "tags")
    except RequestMalformed as error:
        return f"tags that cannot be recorded: {error.message.removesuffix('.')}"
    return None


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def _name(function: Redact) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _place(function: Redact, error: Exception) -> str:
    """Return the last line of the function's own file that the error came from, or nothing if it came from none."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" in line {lines[-1]}" if lines else ""
