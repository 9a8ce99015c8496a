"""A user's function for redaction that fails, or returns something unusable, is named with its line, and the answer is not recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import gateway, serving, wait_until
from scripted_engine import ScriptedEngine
from tiny_policy import TinyPolicy

from deltawire.gateway.recording.redaction import RedactionFailed, redacted
from deltawire.store import Store

SHOWN = {"messages": [{"role": "user", "content": "w1"}], "answer": "w2", "tags": {}, "route": "chat", "model": "policy"}


def broken(shown: Any) -> Any:
    return shown["oops"]


def with_two_arguments(shown: Any, more: Any) -> Any:
    return shown


def test_the_event_names_the_function_and_its_line(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    with serving(ScriptedEngine(str(policy.first.seq)).serve) as url, gateway(store, tmp_path, url, redact=broken) as scene:
        scene.chat()
        wait_until(lambda: "interaction-unusable" in scene.names(), "the answer whose function failed")
        (event,) = [event for event in scene.events if event.name == "interaction-unusable"]
        line = broken.__code__.co_firstlineno + 1
        assert event.fields["reason"] == f"the function {__name__}:broken of --redact failed in line {line}: KeyError('oops')"
        assert not scene.ids()


def test_a_function_with_other_arguments_is_named() -> None:
    with pytest.raises(RedactionFailed, match=rf"{__name__}:with_two_arguments of --redact failed: TypeError"):
        redacted(with_two_arguments, dict(SHOWN))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ("w1", "a str, not what it was given or None"),
        ({}, "a dict without 'messages'"),
        ({**SHOWN, "messages": ["w1"]}, "messages that are not a list of dicts"),
        ({**SHOWN, "messages": 3}, "messages that are not a list of dicts"),
        ({**SHOWN, "messages": [{"role": "user"}]}, "messages that are not a list of dicts"),
        ({**SHOWN, "answer": None}, "an answer that is a NoneType, not text"),
        ({**SHOWN, "tags": None}, "tags that cannot be recorded: tags must be an object"),
        ({**SHOWN, "tags": {"a": 3}}, "tags that cannot be recorded: tags must be an object"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_unusable_result_is_named(found: Any, problem: str) -> None:
    function: Callable[[Any], Any] = lambda shown: found  # noqa: E731
    with pytest.raises(RedactionFailed, match=f"of --redact returned {problem}"):
        redacted(function, dict(SHOWN))


def test_usable_results_are_returned() -> None:
    assert redacted(lambda shown: None, dict(SHOWN)) is None
    assert redacted(lambda shown: {**shown, "tokens": True}, dict(SHOWN)) == {**SHOWN, "tokens": True}
