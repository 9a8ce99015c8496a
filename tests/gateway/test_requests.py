"""Requests of any size and shape get a named error, with bounded memory. Only what callers agree to is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import random
import socket
import threading
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import Scene, gateway, serving, wait_until
from hypothesis import given
from hypothesis import strategies as st

from deltawire.errors import GatewayError, RequestMalformed, RequestSlow, RequestTooLarge, UnusableKeys
from deltawire.format.interactions import ConversationText, Message
from deltawire.gateway.http.api_keys import ApiKeys, Caller
from deltawire.gateway.http.bodies import parse_object, read_body
from deltawire.gateway.http.http_server import listen
from deltawire.gateway.http.requests import read_request
from deltawire.gateway.recording.answer_text import read_answer
from deltawire.gateway.recording.answers import Unusable, intent_of, row_of
from deltawire.store import Store


def raw(scene: Scene, data: bytes, *, most: int = 1 << 16) -> bytes:
    """Send bytes, and return the beginning of what comes back before the gateway closes the connection."""
    with socket.create_connection(("127.0.0.1", int(scene.url.rpartition(":")[2]))) as connection:
        parts = b""
        with contextlib.suppress(OSError):  # the gateway may refuse it before all is sent
            connection.sendall(data)
        with contextlib.suppress(OSError):
            while len(parts) < most and (part := connection.recv(1 << 16)):
                parts += part
        return parts


def test_bodies_of_any_shape_get_a_named_error(scene: Scene) -> None:
    deep = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/feedback"):
        for body in (b"", b"{", b"[]", b"7", b"null", b"\xff\xfe", b'{"a": NaN}', b'{"a": ' + b"9" * 5000 + b"}", b"\0" * 100):
            status, answer, _ = scene.post(path, body)
            assert (status, answer["error"]["type"]) == (400, "RequestMalformed"), (path, body)
    assert scene.post("/v1/chat/completions", deep)[1]["error"]["type"] == "RequestMalformed"
    for headers, error in (
        ({"x-deltawire-episode-id": "x"}, 400),
        ({"x-deltawire-consent": "maybe"}, 400),
        ({"x-deltawire-tags": "{"}, 400),
        ({"x-deltawire-tags": '{"a":1}'}, 400),
        ({"x-deltawire-user": "u" * 600}, 400),
        ({"content-encoding": "br"}, 400),
        ({"content-encoding": "gzip"}, 400),
    ):
        assert scene.chat(headers=headers)[0] == error, headers
    assert scene.chat(n=1000)[0] == 400
    assert scene.get("/v1/chat/completions")[0] == 405
    assert scene.get("/nowhere")[0] == 404
    packed = gzip.compress(json.dumps({"model": "policy", "messages": [{"role": "user", "content": "w1"}], "max_tokens": 1}).encode())
    assert scene.post("/v1/chat/completions", packed, {"content-encoding": "gzip"})[0] == 200


def test_large_bodies_and_heads_are_refused_without_memory_for_them(engine: str, store: Store, tmp_path: Path) -> None:
    with gateway(store, tmp_path, engine, most_bytes=1 << 16) as scene:
        assert scene.chat()[0] == 200
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            status, answer, _ = scene.post("/v1/chat/completions", b" " * (1 << 17))
            assert (status, answer["error"]["type"]) == (413, "RequestTooLarge")
            status, answer, _ = scene.post("/feedback", gzip.compress(b" " * (32 << 20)), {"content-encoding": "gzip"})
            assert (status, answer["error"]["type"]) == (413, "RequestTooLarge")
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            for data in (
                head + b"content-length: 99999999999999999999\r\n\r\n",
                head + b"content-length: 999999999999\r\n\r\n",
                head + b"transfer-encoding: chunked\r\n\r\n" + b"10000\r\n" + b" " * 0x10000 + b"\r\n10000\r\n" + b" " * 0x10000 + b"\r\n",
                head + b"".join(b"x%d: %s\r\n" % (number, b"y" * 8000) for number in range(1000)),
                head + b"x: " + b"y" * (8 << 20),
            ):
                found = raw(scene, data)
                assert found == b"" or found.startswith(b"HTTP/1.1 4"), found[:80]
            # The sender's own copies are in this process too: the largest has 8 MB.
            assert tracemalloc.get_traced_memory()[1] - before < 100 << 20
        finally:
            tracemalloc.stop()
        assert scene.chat()[0] == 200


def test_requests_to_foreign_names_are_refused(engine: str, store: Store, tmp_path: Path) -> None:
    with gateway(store, tmp_path, engine, names=["gw.example"]) as scene:
        for host, status in (("evil.example", 421), ("", 421), ("localhost", 200), ("127.0.0.1:80", 200), ("GW.example:7800", 200)):
            found = raw(scene, f"GET /healthz HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
            assert found.split(b" ", 2)[1] == str(status).encode(), (host, found[:200])
        assert scene.chat(headers={"host": "evil.example"})[1]["error"]["type"] == "HostRefused"
        assert scene.url.startswith("http://127.0.0.1:")


def without_secrets(shown: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if "w7" in shown["messages"][0]["content"]:
        return None
    messages = [{**each, "content": each["content"].replace("w5", "…")} for each in shown["messages"]]
    train = "w6" not in messages[0]["content"]
    return {**shown, "messages": messages, "answer": "…", "tags": {"seen": "yes"}, "train": train, "tokens": True}


def test_only_what_callers_and_rules_allow_is_recorded(engine: str, store: Store, tmp_path: Path) -> None:
    with gateway(store, tmp_path, engine, redact=without_secrets, text=True) as scene:
        names = [
            scene.chat(content, headers=headers)[2]["x-deltawire-inference-id"]
            for content, headers in (
                ("w5 w1", {}),
                ("w6", {}),
                ("w7", {}),
                ("w1", {"x-deltawire-consent": "no", "x-deltawire-tags": '{"a":"b"}'}),
            )
        ]
        scene.wait_for(names[0], names[1], names[3])
        wait_until(lambda: "interaction-unusable" in scene.names(), "the rule")
        found = {one.id: one for file in scene.interactions() for one in file.interactions}
        assert found.keys() == {names[0], names[1], names[3]}
        assert [found[name].train for name in (names[0], names[1], names[3])] == [True, False, False]
        assert found[names[0]].text == ConversationText((Message("user", "… w1"),), "…")
        assert found[names[0]].tags == {"seen": "yes"}


def test_without_consent_by_default_only_answers_whose_request_says_yes_are_trained_on(engine: str, store: Store, tmp_path: Path) -> None:
    with gateway(store, tmp_path, engine, consent=False) as scene:
        said = ({}, {"x-deltawire-consent": "no"}, {"x-deltawire-consent": "yes"})
        names = [scene.chat(headers=headers)[2]["x-deltawire-inference-id"] for headers in said]
        scene.wait_for(*names)
        found = {one.id: one.train for file in scene.interactions() for one in file.interactions}
    assert found == dict(zip(names, [False, False, True], strict=True))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_share_of_answers_that_is_asked_for_is_recorded(
    share: float, engine: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltawire.gateway.recording.recorder.random", random.Random(0))  # what it draws decides which answers are recorded
    with gateway(store, tmp_path, engine, share=share) as scene:
        names = [scene.chat()[2]["x-deltawire-inference-id"] for _ in range(40)]
        draw = random.Random(0)
        recorded = [name for name in names if draw.random() < share]
        scene.wait_for(*recorded)
        said = {name: scene.post("/feedback", {"inference_id": name, "metric_name": "thumbs", "value": True})[0] for name in names}
    assert said == {name: 200 if name in recorded else 404 for name in names}
    assert len(recorded) == {0.0: 0, 0.5: 15, 1.0: 40}[share]
    assert sorted(scene.ids()) == sorted(recorded)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


NAMED = (GatewayError, Unusable)
"""The only errors that hostile input may raise."""


@given(st.dictionaries(st.sampled_from(["messages", "n", "user", "tools", "stream", "temperature", "safety_identifier", "prompt"]), JSON))
def test_requests_of_any_shape_are_read_or_refused(body: dict[str, Any]) -> None:
    with contextlib.suppress(NAMED):
        assert 1 <= read_request("chat", body, {}, Caller(), consent=True).choices <= 128


@given(JSON, st.sampled_from(["chat", "completions", "responses"]))
def test_answers_of_any_shape_are_read_or_left_out(answer: Any, route: str) -> None:
    read_answer(route, [json.dumps(answer).encode()])
    read_answer(route, [b"data: " + json.dumps(answer).encode() + b"\n\n"])
    intent = {"route": route, "choices": 1, "id": "x", "time": 1, "model": "m", "train": True, "temperature": 1.0, "top_p": 1.0}
    intent |= {"episode": None, "user": None, "channel": None, "caller": None, "tags": {}}
    for calls in (answer, [{"prompt_token_ids": [1], "choices": answer}]):
        with contextlib.suppress(NAMED):
            row_of(intent, calls, logprobs=None, oldest=3)


@pytest.mark.parametrize("n", [0, -1, 129, 10**9, 2.0, 5000.0, True, "2", [2], {}])
def test_a_number_of_choices_that_engines_may_read_otherwise_is_refused(n: Any) -> None:
    with pytest.raises(RequestMalformed, match="a whole number from 1 to 128"):
        read_request("completions", {"prompt": ["a", "b"], "n": n}, {}, Caller(), consent=True)


@pytest.mark.parametrize(("body", "choices"), [({}, 1), ({"n": None}, 1), ({"n": 1}, 1), ({"n": 128}, 128)])
def test_the_number_of_choices_is_read(body: dict[str, Any], choices: int) -> None:
    assert read_request("completions", body, {}, Caller(), consent=True).choices == choices


def test_an_engine_that_draws_more_choices_than_were_asked_for_is_not_recorded() -> None:
    """Otherwise a choice would be taken for one of the next prompt."""
    asked = read_request("completions", {"prompt": ["a", "b"]}, {}, Caller(), consent=True)
    choice = {"token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}
    calls = [{"prompt_token_ids": [number], "choices": [choice, choice]} for number in range(2)]
    intent = intent_of(asked, engine="http://e", seq=3, channel=None, user=None)
    with pytest.raises(Unusable, match="more answers than the request asks for"):
        row_of(intent, calls, logprobs=None, oldest=3)


def test_names_of_users_that_are_no_text_are_refused(scene: Scene) -> None:
    status, answer, _ = scene.chat(user="\ud800")
    assert (status, answer["error"]["type"]) == (400, "RequestMalformed")


def test_trailers_after_a_body_have_a_limit(scene: Scene) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    found = raw(scene, head + b"x: y\r\n" * (1 << 20))  # without an end, so the gateway must not wait for it
    assert found == b"" or found.startswith(b"HTTP/1.1 400"), found[:80]


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def receive() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(RequestSlow, match=r"after 0\.01 s"):
        asyncio.run(read_body(receive, {}, 100, seconds=0.01))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: 127."])
def test_a_connection_whose_head_does_not_come_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.gateway.http.http_server.HEAD_SECONDS", 0.05)

    def serve(*, stop: threading.Event, on_ready: Callable[[str], Any]) -> None:
        asyncio.run(listen(None, "127.0.0.1", 0, stop, on_ready))

    with serving(serve) as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        found = b""
        with contextlib.suppress(OSError):  # it may be closed before anything is sent
            connection.sendall(sent)
            found = connection.recv(100)
        assert found == b""


def test_small_bodies_that_would_be_large_in_memory_are_refused() -> None:
    assert len(parse_object(b'{"a":[' + b"[]," * 1000 + b"0]}")["a"]) == 1001
    with pytest.raises(RequestTooLarge, match="2,000,000 values"):
        parse_object(b'{"a":[' + b"[]," * 1_000_001 + b"0]}")


def test_the_hash_of_no_key_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"app {hashlib.sha256(b'').hexdigest()}")
    with pytest.raises(UnusableKeys, match="an empty key"):
        ApiKeys.read(tmp_path / "keys")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{"a": ' + b"9" * 5000 + b"}", "the body has a number with too many digits"),
        (b'{"a": NaN}', "the body is not JSON: NaN is not a number in JSON"),
        (b'{"a"\xff', "the body is not JSON: its byte 4 is not UTF-8"),
        (b"{", "the body is not JSON: Expecting property name"),
    ],
    ids=["digits", "NaN", "bytes", "end"],
)
def test_a_body_that_is_no_json_is_refused_in_words(data: bytes, told: str) -> None:
    with pytest.raises(RequestMalformed, match=told) as caught:
        parse_object(data)
    assert "sys." not in str(caught.value)
