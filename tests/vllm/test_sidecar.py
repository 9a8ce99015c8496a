"""A sidecar sends requests in the right order. The server is a double; test_swaps.py and test_failures.py use real ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltawire import Publisher
from deltawire.chain.log import ChainLog
from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.reports import QUARANTINED, REFUSED, SERVING, Report, read_reports
from deltawire.engines.vllm.routes import EngineUnreachable, RouteFailed
from deltawire.engines.vllm.sidecar import QUARANTINED_LABEL, Sidecar
from deltawire.errors import EngineQuarantined, EngineRefused, EngineUnavailable
from deltawire.events import Event
from deltawire.store import open_store


class ServerDouble:
    """A server with two workers that answer as real ones would. `failing` names the routes that fail, `lost` those that get no answer."""

    def __init__(self) -> None:
        self.restart()
        self.calls: list[str] = []
        self.requests = 0
        self.failing: set[str] = set()
        self.lost: set[str] = set()

    def restart(self) -> None:
        self.name, self.paused = "default", False
        self.worker: dict[str, Any] = {
            "seq": None,
            "staged": None,
            "staging_error": None,
            "quarantined": False,
            "error": None,
            "last": {},
        }

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.requests += 1
        if call in self.lost:
            raise EngineUnreachable("no answer.")
        if call in self.failing:
            raise RouteFailed(call, 500, "broken")

    def weight_version(self) -> str:
        return self.name

    def is_paused(self) -> bool:
        return self.paused

    def status(self) -> list[dict[str, Any]]:
        return [dict(self.worker), dict(self.worker)]

    def initialise(self, info: dict[str, Any]) -> None:
        pass

    def prepare(self, seq: int) -> list[dict[str, Any]]:
        self._note("prepare")
        self.worker["staged"] = None if "stage" in self.failing else seq
        self.worker["staging_error"] = "no such version" if "stage" in self.failing else None
        return self.status()

    def settle(self) -> list[dict[str, Any]]:
        if self.lost:
            raise EngineUnreachable("no answer.")
        return self.status()

    def pause(self, mode: str, *, clear_cache: bool) -> None:
        self._note(f"pause {mode}{' clear' if clear_cache else ''}")
        self.paused = True

    def start_update(self) -> None:
        self._note("start")

    def update(self, seq: int, *, anew: bool = False) -> None:
        assert anew or not self.worker["quarantined"]
        if ("load" if anew else "write") in self.failing:
            self.worker |= {"quarantined": True, "error": "half-way", "seq": None}
        self._note("load" if anew else "write")
        self.worker |= {"seq": seq, "quarantined": False, "error": None}

    def finish_update(self, weight_version: str | None) -> None:
        self._note("finish")
        self.name = str(weight_version)

    def label(self, weight_version: str) -> None:
        self.name = weight_version

    def resume(self) -> None:
        assert not self.worker["quarantined"], "a quarantined server was resumed"
        self._note("resume")
        self.paused = False


class Scene:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = np.zeros(100, np.float32)
        self.publisher = Publisher(folder / "store")
        self.server = ServerDouble()
        self.events: list[Event] = []
        self.sidecar = self.start()

    def start(self) -> Sidecar:
        return Sidecar(
            self.server,  # type: ignore[arg-type]
            self.folder / "store",
            self.folder / "mirror",
            options=ReaderOptions(reader="engine"),
            on_event=self.events.append,
        )

    def publish(self) -> int:
        self.weights[0] += 1
        return int(self.publisher.publish({"w": self.weights}).seq)  # type: ignore[union-attr]

    def report(self) -> Report:
        with open_store(self.folder / "store") as store:
            (report,) = read_reports(store, ChainLog(store).run)
            return report


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.sidecar.close()
    scene.publisher.close()


def test_a_version_is_staged_before_the_pause_and_named_before_the_server_continues(scene: Scene) -> None:
    seq = scene.publish()
    assert scene.sidecar.step() is not None
    assert scene.server.calls == ["prepare", "pause keep clear", "start", "write", "finish", "resume"]
    assert scene.server.name == str(seq)
    assert (scene.report().state, scene.report().seq) == (SERVING, seq)
    assert scene.sidecar.step() is None
    (swapped,) = (event for event in scene.events if event.name == "swapped")
    assert swapped.fields["http_calls"] == 5


def test_a_version_that_cannot_be_staged_never_pauses_the_server(scene: Scene) -> None:
    scene.publish()
    scene.server.failing = {"stage"}
    with pytest.raises(EngineRefused, match="no such version"):
        scene.sidecar.step()
    assert scene.server.calls == ["prepare"]
    assert scene.report().state == REFUSED


def test_a_server_that_refuses_continues_with_what_it_has(scene: Scene) -> None:
    scene.publish()
    scene.server.failing = {"start"}
    with pytest.raises(EngineRefused):
        scene.sidecar.step()
    assert not scene.server.paused
    assert scene.report().state == REFUSED


def test_an_update_that_fails_half_way_is_repaired_before_the_server_continues(scene: Scene) -> None:
    seq = scene.publish()
    scene.server.failing = {"write"}
    scene.sidecar.step()
    assert scene.server.calls[3:] == ["write", "pause keep clear", "start", "load", "finish", "resume"]
    assert scene.server.name == str(seq)
    assert [event.name for event in scene.events if event.name in ("engine-quarantined", "repaired")] == ["engine-quarantined", "repaired"]


def test_a_server_that_cannot_be_repaired_stays_paused_until_it_can(scene: Scene) -> None:
    scene.publish()
    scene.server.failing = {"write", "load"}
    for _ in range(2):
        with pytest.raises(EngineQuarantined):
            scene.sidecar.step()
        assert scene.server.paused
        assert scene.server.name == QUARANTINED_LABEL
        assert (scene.report().state, scene.report().error) == (QUARANTINED, "worker 0: half-way; worker 1: half-way")
    scene.server.failing = set()
    seq = scene.publish()
    scene.sidecar.step()
    assert not scene.server.paused
    assert (scene.report().state, scene.report().seq) == (SERVING, seq)


def test_new_weights_are_never_served_under_the_old_label(scene: Scene) -> None:
    first = scene.publish()
    scene.sidecar.step()
    seq = scene.publish()
    scene.server.failing = {"finish"}
    with pytest.raises(EngineQuarantined):
        scene.sidecar.step()
    assert scene.server.paused
    assert scene.server.name == QUARANTINED_LABEL != str(first)
    scene.server.failing = set()
    scene.sidecar.step()
    assert not scene.server.paused
    assert scene.server.name == str(seq)


def test_a_server_that_does_not_resume_is_resumed_by_the_next_step(scene: Scene) -> None:
    seq = scene.publish()
    scene.server.failing = {"resume"}
    with pytest.raises(EngineUnavailable):
        scene.sidecar.step()
    assert scene.server.paused
    assert scene.server.name == str(seq)
    scene.server.failing = set()
    scene.server.calls.clear()
    scene.sidecar.step()
    assert scene.server.calls == ["resume"]
    assert (scene.report().state, scene.report().seq) == (SERVING, seq)


def test_a_server_that_is_lost_during_an_update_is_asked_what_it_has(scene: Scene) -> None:
    seq = scene.publish()
    scene.server.lost = {"write"}
    with pytest.raises(EngineUnreachable):
        scene.sidecar.step()
    scene.server.lost = set()
    scene.server.calls.clear()
    scene.sidecar.step()
    assert scene.server.calls == ["prepare", "pause keep clear", "start", "write", "finish", "resume"]
    assert scene.server.name == str(seq)


def test_a_server_that_was_restarted_is_brought_to_the_newest_version(scene: Scene) -> None:
    seq = scene.publish()
    scene.sidecar.step()
    scene.server.restart()
    assert scene.sidecar.step() is not None
    assert scene.server.name == str(seq)


def test_a_new_sidecar_resumes_a_server_that_the_one_before_left_paused(scene: Scene) -> None:
    scene.publish()
    scene.sidecar.step()
    scene.server.paused = True
    scene.server.calls.clear()
    again = scene.start()
    again.step()
    again.close()
    assert scene.server.calls == ["resume"]
