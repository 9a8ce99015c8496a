"""Requests to a server end, even if it does not answer. The server is a double that answers a pause when the test says so, or never."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deltawire.engines.http_session import http_session
from deltawire.engines.vllm.driver import routes as module
from deltawire.engines.vllm.driver.routes import EngineUnreachable, RouteFailed, VllmRoutes, WrongServer


class SlowServer(ThreadingHTTPServer):
    """A server that answers /health with `health`. It answers a pause after `looks` such requests, and not before `answers` is set."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.health, self.looks = 200, 0
        self.asked, self.answers = threading.Event(), threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: SlowServer

    def do_GET(self) -> None:
        if self.path == "/server_info?config_format=json":
            config = {"model_config": {"logprobs_mode": "raw_logprobs"}, "device_config": {"device": "cpu"}}
            self._answer(200, {"vllm_config": config})
            return
        self.server.looks += 1
        if self.server.looks == 3:
            self.server.answers.set()
        self._answer(self.server.health, None)

    def do_POST(self) -> None:
        self.server.asked.set()
        self.server.answers.wait(60)
        self._answer(200, None)

    def _answer(self, status: int, content: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowServer]:
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.05)
    with SlowServer() as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server
        server.answers.set()
        server.shutdown()
        serving.join()


@pytest.fixture
def routes(server: SlowServer) -> VllmRoutes:
    return VllmRoutes(f"http://127.0.0.1:{server.server_port}/")


def test_a_server_that_takes_its_time_is_waited_for(server: SlowServer, routes: VllmRoutes) -> None:
    routes.pause("keep", clear_cache=True)
    assert server.looks >= 3


def test_a_server_whose_engine_has_died_ends_the_wait(server: SlowServer, routes: VllmRoutes) -> None:
    server.health = 503
    with pytest.raises(EngineUnreachable, match="has ended"):
        routes.pause("keep", clear_cache=True)
    with pytest.raises(RouteFailed, match="503"):
        routes.check_alive()


def test_a_server_that_accepts_no_requests_ends_the_wait(server: SlowServer, routes: VllmRoutes) -> None:
    def close_the_door() -> None:
        server.asked.wait(60)
        server.shutdown()
        server.server_close()

    closing = threading.Thread(target=close_the_door)
    closing.start()
    with pytest.raises(EngineUnreachable, match="has ended"):
        routes.pause("keep", clear_cache=True)
    closing.join()


def test_the_device_of_the_server_is_known(routes: VllmRoutes) -> None:
    assert routes.settings() == ("raw_logprobs", "cpu")


def portals() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "portal" in thread.name}


def test_all_requests_share_one_thread_which_ends_with_the_client(server: SlowServer) -> None:
    before = portals()
    client = VllmRoutes(f"http://127.0.0.1:{server.server_port}")
    for _ in range(5):
        client.settings()
    (own,) = portals() - before
    assert client.requests == 5
    client.close()
    assert not own.is_alive()
    client.settings()  # a later request starts another thread
    (own,) = portals() - before
    del client
    gc.collect()
    own.join(60)
    assert not own.is_alive()


def test_a_session_forgets_requests_that_have_ended(server: SlowServer) -> None:
    with http_session(f"http://127.0.0.1:{server.server_port}") as session:
        pending = [session.begin("GET", "/health", timeout=60) for _ in range(5)]
        for one in pending:
            one.answer()
        session.ask("GET", "/health", timeout=60)
        assert len(session._pending) <= 1  # the last one is forgotten after its answer was handed over


@pytest.mark.parametrize(
    ("status", "kind", "content", "error", "advice"),
    [
        (404, "application/json", '{"detail":"Not Found"}', WrongServer, "with VLLM_SERVER_DEV_MODE=1, and give its URL without /v1."),
        (500, "application/json", '{"error":"Weight transfer not configured."}', WrongServer, """ '{"backend": "deltawire"}'."""),
        (500, "application/json", '{"error":"unknown"}', RouteFailed, """ '{"backend": "deltawire"}'."""),
        (501, "text/html;charset=utf-8", "<html>" * 1000, WrongServer, "VLLM_SERVER_DEV_MODE=1"),
        (200, "text/html", "<html>" * 1000, WrongServer, "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_server_that_cannot_take_weights_gets_advice(
    server: SlowServer, routes: VllmRoutes, monkeypatch: pytest.MonkeyPatch, status: int, kind: str, content: str, error: Any, advice: str
) -> None:
    def answer(handler: Handler) -> None:
        handler.send_response(status)
        handler.send_header("content-type", kind)
        handler.end_headers()
        handler.wfile.write(content.encode())

    monkeypatch.setattr(Handler, "do_POST", answer)
    with pytest.raises(RouteFailed) as raised:
        routes.initialise({})
    assert type(raised.value) is error
    assert advice in str(raised.value)
    assert str(status) in str(raised.value)
    assert "<html>" not in str(raised.value)
    assert len(str(raised.value)) < 300
    routes.close()
