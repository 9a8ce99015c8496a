"""The readiness route says whether a server serves a version of the chain."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from sidecar_scene import Scene

from deltawire.engines.http_session import http_session
from deltawire.engines.vllm.driver import readiness
from deltawire.engines.vllm.driver.readiness import ReadinessRoute, ServerProbe
from deltawire.errors import EngineError, EngineRefused


def ask(port: int, path: str = "/ready") -> tuple[int, dict[str, Any]]:
    with http_session(f"http://127.0.0.1:{port}") as session:
        answer = session.ask("GET", path, timeout=60)
        return answer.status, json.loads(answer.content) if answer.status in (200, 503) else {}


def test_the_readiness_route_says_which_version_is_served_or_why_none(scene: Scene) -> None:
    scene.server.one_call = True
    with ReadinessRoute("127.0.0.1:0", scene.sidecar.readiness) as route:
        assert ask(route.port) == (503, {"reason": "the server has no version of the chain yet."})
        seq = scene.publish()
        scene.server.answers = ["quarantined", "quarantined"]
        stop = threading.Event()
        running = threading.Thread(target=scene.sidecar.run, kwargs={"poll": 0.01, "stop": stop})
        running.start()
        while not any(event.name == "swapped" for event in scene.events):
            assert running.is_alive()
            status, told = ask(route.port)
            assert status == 503 or told == {"seq": seq, "updates": 1}
        stop.set()
        running.join()
        assert ask(route.port) == (200, {"seq": seq, "updates": 1})
        scene.publish()
        scene.server.answers = ["refused"]
        with pytest.raises(EngineRefused):
            scene.sidecar.step()
        assert ask(route.port) == (200, {"seq": seq, "updates": 1})  # it serves the version before
        assert ask(route.port, "/other")[0] == 404


@pytest.mark.parametrize("address", ["8001", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:65536"])
def test_an_address_that_cannot_be_read_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        ReadinessRoute(address, lambda: (True, {}))


def test_a_port_that_is_taken_is_named() -> None:
    with (
        ReadinessRoute("127.0.0.1:0", lambda: (True, {})) as route,
        pytest.raises(EngineError, match=f"cannot listen on 127.0.0.1:{route.port}"),
    ):
        ReadinessRoute(f"127.0.0.1:{route.port}", lambda: (True, {}))


class FakeServer(ThreadingHTTPServer):
    """Answers the two questions of `ServerProbe` as a vLLM server does."""

    daemon_threads = True
    label, is_paused = "3", False
    worker: dict[str, Any] | None = None
    """The status of its one worker. None if the server does not tell it."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.server.answers.wait()
        told = {"/weight_info": {"weight_version": self.server.label}, "/is_paused": {"is_paused": self.server.is_paused}}[self.path]
        self._answer(told)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.worker is None or (self.path, asked["method"]) != ("/collective_rpc", "deltawire_status"):
            self.send_error(500)
            return
        self._answer({"results": [self.server.worker]})

    def _answer(self, told: dict[str, Any]) -> None:
        content = json.dumps(told).encode()
        with contextlib.suppress(ConnectionError):  # a client that no longer waits
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(readiness, "_PATIENCE", 0.0)
    monkeypatch.setattr(readiness, "_PROBE_SECONDS", 600.0)  # a busy machine may be slow
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.answers.set()
        server.shutdown()
        thread.join()


def test_the_server_itself_is_asked_whether_it_generates(server: FakeServer) -> None:
    probe = ServerProbe(server.url, lambda: (True, {"seq": 3}))
    assert probe() == (True, {"seq": 3})
    server.is_paused = True
    assert probe() == (False, {"reason": "the server is paused."})
    server.worker = {"seq": 3, "unended_update": None}
    assert probe() == (False, {"reason": "the server is paused."})
    server.worker["unended_update"] = "a program has begun an update: POST /resume"
    assert probe() == (False, {"reason": "the server stays paused: a program has begun an update: POST /resume."})
    server.is_paused, server.label = False, "default"
    assert probe() == (False, {"reason": "the server has the weights 'default' instead of those of commit 3."})
    server.label = "3"
    assert probe() == (True, {"seq": 3})
    probe.close()


def test_a_server_that_is_not_ready_for_its_sidecar_is_not_asked() -> None:
    probe = ServerProbe("http://127.0.0.1:9", lambda: (False, {"reason": "it has no version yet."}))
    assert probe() == (False, {"reason": "it has no version yet."})
    probe.close()


def test_a_server_that_hangs_or_has_ended_is_not_ready(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = ServerProbe(server.url, lambda: (True, {"adapters": {"math": "math-v1"}}))
    assert probe() == (True, {"adapters": {"math": "math-v1"}})
    server.answers.clear()
    monkeypatch.setattr(readiness, "_PROBE_SECONDS", 0.2)
    is_ready, told = probe()
    assert not is_ready
    assert "no answer after" in told["reason"]
    probe.close()
    gone = ServerProbe("http://127.0.0.1:9", lambda: (True, {"seq": 3}))
    is_ready, told = gone()
    assert not is_ready
    assert "127.0.0.1:9" in told["reason"]
    gone.close()


def test_a_swap_in_progress_does_not_make_a_server_unready(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "_PATIENCE", 600.0)
    server.is_paused = True
    looks = 0

    def check() -> tuple[bool, dict[str, Any]]:
        nonlocal looks
        looks += 1
        server.is_paused = looks < 3
        return True, {"seq": 3}

    probe = ServerProbe(server.url, check)
    assert probe() == (True, {"seq": 3})
    assert looks == 3
    probe.close()
