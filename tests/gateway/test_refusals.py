"""The page about gates says which answers count as refusals, and these are the ones that do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deltawire.gateway.recording.answer_text import read_answer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "gate.md").read_text(encoding="utf-8")
BEGINNINGS = re.findall(r"`([^`]+)`", next(line for line in PAGE.splitlines() if line.startswith("- its text begins")))


def is_refusal(text: str, **message: str) -> bool:
    body = {"choices": [{"index": 0, "message": {"content": text, **message}, "finish_reason": "stop"}]}
    return read_answer("chat", [json.dumps(body).encode()])[0].facts(3, frozenset()).refusal


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_an_answer_with_a_beginning_on_the_page_is_a_refusal(beginning: str) -> None:
    assert is_refusal(f" \n{beginning.upper()} help.")
    assert not is_refusal(f"Well, {beginning} help.")


def test_nothing_else_is_a_refusal() -> None:
    from deltawire.gateway.recording import answer_text

    assert sorted(each.lower() for each in BEGINNINGS) == sorted(answer_text._REFUSING)
    assert is_refusal("Here you are.", refusal="No.")
    assert not is_refusal("Das kann ich nicht.", refusal="")
