"""Engines are on this machine, so no request to them may go through a proxy, even if the environment names one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltawire.engines.http_session import NoAnswer, http_session
from deltawire.engines.sglang import SglangEngine
from deltawire.engines.vllm.driver import routes as routes_module
from deltawire.engines.vllm.driver.routes import VllmRoutes
from deltawire.errors import EngineUnavailable
from deltawire.trainers.trl import DeltaWireTransfer

KEY = "secret-of-the-engine"


class Recording(ThreadingHTTPServer):
    """A server that records its requests. As a proxy it fails all of them. As an engine it takes long to pause."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, *, proxy: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.proxy = proxy
        self.asked: list[tuple[str, str, str | None]] = []
        self.looks = 0
        self.looked_twice = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Recording

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_CONNECT = do_GET

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization")))
        if self.server.proxy:
            self.send_error(503)
            return
        if self.path == "/health":
            self.server.looks += 1
            if self.server.looks == 2:
                self.server.looked_twice.set()
        if self.path.startswith("/pause?"):
            self.server.looked_twice.wait(60)  # the client checks meanwhile whether the server still runs
        content = json.dumps({"success": True, "weight_version": "3"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    with _serving(Recording(proxy=True)) as server:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, server.url)
            monkeypatch.setenv(name.upper(), server.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield server


@pytest.fixture
def engine() -> Iterator[Recording]:
    with _serving(Recording(proxy=False)) as server:
        yield server


@contextmanager
def _serving(server: Recording) -> Iterator[Recording]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.looked_twice.set()
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_slow_vllm_is_not_taken_for_dead_because_of_a_proxy(proxy: Recording, engine: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_module, "_CHECK_SECONDS", 0.01)
    routes = VllmRoutes(engine.url)
    routes.pause("keep", clear_cache=True)
    assert engine.looks >= 2
    assert routes.weight_version() == "3"
    assert not proxy.asked


def test_only_the_sglang_server_sees_its_keys(proxy: Recording, engine: Recording, tmp_path: Path) -> None:
    sglang = SglangEngine(engine.url, tmp_path, api_key=KEY)
    sglang.resume()
    assert ("POST", "/continue_generation", f"Bearer {KEY}") in engine.asked
    assert not proxy.asked


def test_the_wait_for_a_server_of_trl_asks_the_server(proxy: Recording, engine: Recording) -> None:
    transfer = DeltaWireTransfer("memory://unused", server=engine.url)
    version: Any = SimpleNamespace(seq=3)
    assert transfer._is_served(version, set())
    assert not proxy.asked


def test_names_and_addresses_of_this_machine_are_asked_directly(proxy: Recording, engine: Recording) -> None:
    with http_session(f"http://localhost:{engine.server_port}") as session:
        assert session.ask("GET", "/health", timeout=60).status == 200
    assert not proxy.asked


def test_a_server_that_has_ended_is_distinguished_from_one_that_closes_a_connection(
    proxy: Recording, engine: Recording, tmp_path: Path
) -> None:
    engine.shutdown()
    engine.server_close()
    with http_session(engine.url) as session, pytest.raises(NoAnswer) as caught:
        session.ask("GET", "/health", timeout=60)
    assert caught.value.refused
    with pytest.raises(EngineUnavailable, match=engine.url):
        SglangEngine(engine.url, tmp_path, api_key=KEY).resume()
    assert not proxy.asked


def test_cancelled_requests_do_not_keep_the_session_open(engine: Recording) -> None:
    with http_session(engine.url) as session:
        pending = session.begin("POST", "/pause?mode=keep", {}, timeout=600)
        assert session.ask("GET", "/health", timeout=60).status == 200  # there are several requests at a time
        assert not pending.wait(0)
    with pytest.raises(NoAnswer, match="cancelled"):
        pending.answer()
