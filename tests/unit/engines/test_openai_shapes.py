"""The small OpenAI server reads requests, and refuses what no model of text can answer."""

from __future__ import annotations

from typing import Any

import pytest

from deltawire.errors import RequestMalformed
from deltawire.gateway.http.bodies import error_body
from deltawire.rl.serving.openai_shapes import read_wanted

MESSAGES = [{"role": "user", "content": "w1"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


def said(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"n": 0}, "n must be"),
        ({"n": False}, "n must be"),
        ({"n": "2"}, "n must be"),
        ({"n": 17}, "n must be"),
        ({"stream": "yes"}, "stream must be"),
        ({"stream": 1}, "stream must be"),
        ({"messages": said(7)}, "must be a text"),
        ({"messages": said({"text": "w1"})}, "must be a text"),
        ({"messages": said([{"type": "text", "text": "w1"}, IMAGE])}, "no images"),
        ({"messages": said([{"type": "input_audio", "input_audio": {}}])}, "no images"),
        ({"messages": said(["w1"])}, "no images"),
        ({"messages": said([{"type": ["text"]}])}, "no images"),
        ({"messages": said([{"type": "text", "text": 7}])}, "but no text"),
        ({"messages": said([{"type": "text"}])}, "but no text"),
    ],
)
def test_what_no_model_can_answer_is_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(RequestMalformed, match=word) as raised:
        read_wanted("chat", {"messages": MESSAGES, **fields})
    error = error_body(raised.value)["error"]
    assert (error["type"], error["code"], error.keys()) == ("RequestMalformed", 400, {"message", "type", "param", "code"})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("w1 w2", "w1 w2"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "w1 "}, {"type": "text", "text": "w2"}], "w1 w2"),
        ([{"type": "input_text", "text": "w3"}], "w3"),
        ([{"type": "refusal", "refusal": "w4"}], "w4"),
        ([{"text": "w5"}], "w5"),
    ],
)
def test_a_content_is_a_text_or_parts_of_one(content: Any, text: str) -> None:
    assert read_wanted("chat", {"messages": said(content, "assistant")}).prompts == [said(text, "assistant")]
    assert read_wanted("responses", {"input": said(content, "assistant")}).prompts == [said(text, "assistant")]


def test_what_a_request_leaves_out_has_a_default() -> None:
    for fields in ({}, {"n": None, "stream": None}, {"n": 1, "stream": False}):
        wanted = read_wanted("chat", {"messages": MESSAGES, **fields})
        assert (wanted.choices, wanted.stream) == (1, False)
    assert read_wanted("chat", {"messages": MESSAGES, "n": 2, "stream": True}).stream
