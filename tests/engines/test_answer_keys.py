"""A vLLM server shows answers of users only to those who have one of its keys, wherever it has the keys from."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest

from deltawire.engines.answer_table import ANSWERS_ROUTE, ENGINE_ROUTE
from deltawire.engines.vllm.answer_recorder import AnswerRecorder


async def no_app(*_: object) -> None:
    raise AssertionError("the middleware answers by itself")


async def receive() -> MutableMapping[str, Any]:
    raise AssertionError("the request has no body")


def status_of(path: str, given: str | None, keys: list[str] | None) -> int:
    sent: list[Any] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def version() -> str:
        return "7"

    async def paused() -> bool:
        return False

    client = SimpleNamespace(get_weight_version=version, is_paused=paused, model_config=SimpleNamespace(logprobs_mode="raw_logprobs"))
    state = SimpleNamespace(args=SimpleNamespace(api_key=keys), engine_client=client)
    headers = [] if given is None else [(b"authorization", f"Bearer {given}".encode())]
    scope = {"type": "http", "path": path, "headers": headers, "method": "GET", "app": SimpleNamespace(state=state)}
    asyncio.run(AnswerRecorder(no_app)(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize(("path", "found"), [(ENGINE_ROUTE, 200), (f"{ANSWERS_ROUTE}some-answer", 404)])
@pytest.mark.parametrize(
    ("keys", "variable", "right", "wrong"),
    [
        (None, None, [None, "any"], []),
        ([], "", [None, "any"], []),
        (["one", "two"], None, ["one", "two"], [None, "", "three"]),
        (None, "secret", ["secret"], [None, "", "three"]),
        ([], "secret", ["secret"], [None, "", "three"]),
        (["one"], "secret", ["one"], [None, "", "secret"]),
    ],
)
def test_answers_of_a_server_are_read_with_its_key_only(
    path: str,
    found: int,
    keys: list[str] | None,
    variable: str | None,
    right: list[str | None],
    wrong: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_API_KEY", variable)
    assert [status_of(path, given, keys) for given in right] == [found] * len(right)
    assert [status_of(path, given, keys) for given in wrong] == [401] * len(wrong)
