"""Requests for other routes, with other methods, or that are not HTTP are refused by name, are counted, and fill no log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import Scene, ask, gateway, wait_until
from tiny_policy import TinyPolicy

from deltawire.gateway.http.http_server import bounded_http
from deltawire.store import Store


@pytest.fixture
def idle(policy: TinyPolicy, store: Store, tmp_path: Path) -> Iterator[Scene]:
    """A gateway whose engine does not answer."""
    with gateway(store, tmp_path, "http://127.0.0.1:9") as made:
        yield made


def refused(scene: Scene) -> list[tuple[Any, ...]]:
    return [tuple(event.fields[name] for name in ("route", "status", "error")) for event in scene.events if event.name == "request-refused"]


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/", "/docs"])
def test_an_unknown_route_is_refused_with_those_that_there_are(path: str, idle: Scene) -> None:
    for status, answer, _ in (idle.post(path, {}), idle.get(path)):
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (404, "RouteUnknown", 404)
        message = answer["error"]["message"]
        assert f"this gateway has no route {path!r}; it has /v1/chat/completions, /v1/completions, /v1/responses," in message
        assert "Set base_url to the address of the gateway with /v1 at its end." in message
    assert refused(idle) == [(path, 404, "RouteUnknown")] * 2
    assert len(idle.get(f"/{'x' * 5000}")[1]["error"]["message"]) < 500


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/feedback", "Send feedback to /feedback, without /v1."),
        ("/v1/embeddings", "Use one of these routes."),
    ],
)
def test_an_unknown_route_under_v1_gets_advice_that_fits(path: str, hint: str, idle: Scene) -> None:
    message = idle.post(path, {})[1]["error"]["message"]
    assert message.endswith(f". {hint}")
    assert "base_url" not in message


def test_a_wrong_method_is_refused_with_the_right_one(idle: Scene) -> None:
    for path, wrong, right in (
        ("/feedback", "GET", "POST"),
        ("/v1/chat/completions", "PUT", "POST"),
        ("/v1/models", "DELETE", "GET, HEAD"),
    ):
        status, answer, headers = ask(urllib.request.Request(idle.url + path, method=wrong))
        assert (status, answer["error"]["type"], headers["allow"]) == (405, "MethodUnknown", right)
        assert f"{path} takes {right.partition(',')[0]} and not {wrong}." in answer["error"]["message"]
    assert [each[1:] for each in refused(idle)] == [(405, "MethodUnknown")] * 3
    assert ask(urllib.request.Request(f"{idle.url}/metrics", method="HEAD"))[0] == 200


BAD_HEADS = {"no HTTP": b"\x16\x03\x01 no HTTP\r\n\r\n", "long head": b"GET / HTTP/1.1\r\nx: " + b"y" * (1 << 21)}


@pytest.mark.parametrize("data", BAD_HEADS.values(), ids=BAD_HEADS)
def test_what_is_not_http_is_counted_and_not_logged(data: bytes, idle: Scene, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="uvicorn.error"):
        for count in range(1, 4):
            with socket.create_connection(("127.0.0.1", int(idle.url.rpartition(":")[2]))) as connection:
                with contextlib.suppress(OSError):  # the gateway may close it before all is sent
                    connection.sendall(data)
                wait_until(lambda: len(refused(idle)) >= count, "the event")  # noqa: B023
    assert set(refused(idle)) == {("-", 400, "RequestMalformed")}
    assert [record for record in caplog.records if record.name.startswith("uvicorn") and record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("has_httptools", [True, False])
def test_warnings_are_left_out_and_errors_are_not(
    has_httptools: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import uvicorn
    from uvicorn.server import ServerState

    if not has_httptools:
        monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)
    config = uvicorn.Config(lambda: None, log_config=None, ws="none", lifespan="off")
    config.load()
    caplog.clear()

    async def work() -> None:
        protocol = bounded_http()(config, ServerState(), {})
        protocol.logger.warning("a caller sent nonsense")
        protocol.logger.error("the application failed")

    asyncio.run(work())
    assert [record.message for record in caplog.records] == ["the application failed"]
