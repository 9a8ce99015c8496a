"""The readiness route says whether a server serves a version of the chain."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from sidecar_scene import Scene

from deltawire.engines.http_session import http_session
from deltawire.engines.vllm.driver.readiness import ReadinessRoute
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
