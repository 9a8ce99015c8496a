"""A sidecar checks what a server computes after each update. The server is a double; test_canary_server.py uses a real one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sidecar_scene import Scene
from typer.testing import CliRunner

from deltawire import Publisher, SigningKey
from deltawire.chain.log import ChainLog
from deltawire.chain.records.canaries import put_canary, read_canary
from deltawire.chain.records.reports import QUARANTINED, SERVING
from deltawire.cli import app
from deltawire.engines.vllm.driver.canary import generate
from deltawire.engines.vllm.driver.routes import RouteFailed
from deltawire.engines.vllm.driver.server_canary import record_canary
from deltawire.engines.vllm.driver.sidecar import QUARANTINED_LABEL, Sidecar
from deltawire.errors import DecodingDiffers, EngineQuarantined, EngineRefused, EngineUnavailable, VersionUnknown
from deltawire.store import keys, open_store


@pytest.fixture(params=[True, False], ids=["one call", "routes"])
def checked(scene: Scene, request: pytest.FixtureRequest) -> Iterator[tuple[Scene, Sidecar]]:
    """A scene whose server has its first version, and a sidecar with the canary `self`."""
    scene.server.one_call = request.param
    with contextlib.closing(scene.start(canary="self")) as sidecar:
        scene.publish()
        sidecar.step()
        scene.server.calls.clear()
        yield scene, sidecar


def named(scene: Scene, name: str) -> list[Any]:
    return [event.fields for event in scene.events if event.name == name]


@contextlib.contextmanager
def open_log(scene: Scene) -> Iterator[ChainLog]:
    with open_store(scene.folder / "store") as store:
        yield ChainLog(store)


def test_nothing_is_checked_unless_asked_for(scene: Scene) -> None:
    scene.publish()
    scene.server.failing = {"complete"}
    scene.sidecar.step()
    assert named(scene, "canary-passed") == []


def test_each_version_is_checked_once(checked: tuple[Scene, Sidecar]) -> None:
    scene, sidecar = checked
    salts = scene.server.completions.salts
    assert len(salts) == 4  # once before the first swap, to learn what is usual, and once after it
    sidecar.step()
    assert len(salts) == 4
    seq = scene.publish()
    sidecar.step()
    assert len(salts) == 6
    assert [(event["seq"], event["canary"], event["tokens"]) for event in named(scene, "canary-passed")][1:] == [(seq, "self", 32)]


def test_a_server_that_fails_gets_the_version_anew_once_and_is_then_refused(checked: tuple[Scene, Sidecar]) -> None:
    scene, sidecar = checked
    seq = scene.publish()
    scene.server.completions.stale = 0.5
    with pytest.raises(EngineQuarantined, match=r"differ by up to 0\.5"):
        sidecar.step()
    assert (scene.server.paused, scene.server.name, sidecar.served) == (True, QUARANTINED_LABEL, None)
    assert (scene.report().state, sidecar.readiness()[0]) == (QUARANTINED, False)
    assert "differ by up to 0.5" in str(scene.report().error)
    scene.server.calls.clear()
    with pytest.raises(DecodingDiffers):  # this step loads the version anew
        sidecar.step()
    assert any(call in ("swap drop store", "load") for call in scene.server.calls)
    assert (scene.server.paused, scene.server.name) == (True, QUARANTINED_LABEL)
    scene.server.calls.clear()
    for _ in range(2):
        with pytest.raises(DecodingDiffers, match="even after it was loaded anew"):
            sidecar.step()
    assert scene.server.calls == []
    assert [event["seq"] for event in named(scene, "canary-failed")] == [seq, seq]
    assert len(named(scene, "engine-quarantined")) == 2
    scene.server.completions.stale = 0.0
    later = scene.publish()
    sidecar.step()
    assert (scene.server.paused, scene.server.name, scene.report().state) == (False, str(later), SERVING)


def test_a_version_that_is_right_when_it_is_loaded_anew_is_served(checked: tuple[Scene, Sidecar]) -> None:
    scene, sidecar = checked
    seq = scene.publish()
    scene.server.completions.stale = 0.5
    with pytest.raises(EngineQuarantined):
        sidecar.step()
    scene.server.completions.stale = 0.0
    sidecar.step()
    assert (scene.server.paused, scene.server.name, scene.report().state) == (False, str(seq), SERVING)


def test_a_server_that_is_restarted_gets_the_version_that_it_was_refused(checked: tuple[Scene, Sidecar]) -> None:
    scene, sidecar = checked
    seq = scene.publish()
    scene.server.completions.stale = 0.5
    for error in (EngineQuarantined, DecodingDiffers, DecodingDiffers):
        with pytest.raises(error):
            sidecar.step()
    scene.server.restart()
    scene.server.completions.stale = 0.0
    sidecar.step()
    assert scene.server.name == str(seq)


def test_a_new_sidecar_does_not_trust_a_server_that_has_failed(checked: tuple[Scene, Sidecar]) -> None:
    scene, sidecar = checked
    seq = scene.publish()
    scene.server.completions.stale = 0.5
    with pytest.raises(EngineQuarantined):
        sidecar.step()
    scene.server.calls.clear()
    with contextlib.closing(scene.start()) as other:
        other.step()
    assert any(call in ("swap drop store", "load") for call in scene.server.calls)
    assert scene.server.name == str(seq)


def test_a_server_that_always_differs_is_compared_with_its_start(scene: Scene) -> None:
    scene.server.one_call = True
    scene.server.completions.stale = 6.0
    with contextlib.closing(scene.start(canary="self")) as sidecar:
        scene.publish()
        sidecar.step()
        assert [event["largest"] for event in named(scene, "canary-learnt")] == [pytest.approx(6.0)]
        scene.server.completions.stale = 19.0
        scene.publish()
        with pytest.raises(EngineQuarantined):
            sidecar.step()


def test_a_held_server_learns_what_is_usual_from_its_first_version(scene: Scene) -> None:
    """A healthy server that computes in bf16 can differ by more than the limits for other servers."""
    scene.server.one_call = scene.server.held = scene.server.paused = True
    scene.server.completions.stale = 0.25
    with contextlib.closing(scene.start(canary="self")) as sidecar:
        for _ in range(2):
            scene.publish()
            sidecar.step()
        assert [event["largest"] for event in named(scene, "canary-learnt")] == [pytest.approx(0.25)]
        assert len(named(scene, "canary-passed")) == 2
        scene.server.completions.stale = 0.8
        scene.publish()
        with pytest.raises(EngineQuarantined, match=r"more than 0\.75 for one token"):
            sidecar.step()


def test_a_held_server_that_differs_more_than_any_healthy_one_is_quarantined(scene: Scene) -> None:
    scene.server.one_call = scene.server.held = scene.server.paused = True
    scene.server.completions.stale = 6.0
    scene.publish()
    with contextlib.closing(scene.start(canary="self")) as sidecar, pytest.raises(EngineQuarantined):
        sidecar.step()
    assert named(scene, "canary-learnt") == []


def test_a_version_is_recorded_from_a_server_that_computes_in_bf16(scene: Scene) -> None:
    scene.server.one_call = True
    scene.publish()
    scene.sidecar.step()
    scene.server.completions.stale = 0.25
    with open_log(scene) as log:
        assert not record_canary(scene.server, log).was_there  # type: ignore[arg-type]


def test_a_paused_server_is_checked_when_it_runs_again(checked: tuple[Scene, Sidecar]) -> None:
    scene, sidecar = checked
    sidecar._canary.forget()  # type: ignore[union-attr]
    scene.server.paused = True
    sidecar.step()
    assert len(named(scene, "canary-passed")) == 1
    scene.server.paused = False
    sidecar.step()
    assert len(named(scene, "canary-passed")) == 2


def test_a_server_that_cannot_be_checked_is_not_updated(scene: Scene) -> None:
    scene.publish()
    scene.server.failing, scene.server.completions_status = {"complete"}, 400
    with contextlib.closing(scene.start(canary="self")) as sidecar, pytest.raises(EngineRefused, match="canary"):
        sidecar.step()
    assert scene.server.calls == []


def test_a_server_that_answers_with_an_error_after_an_update_has_failed(checked: tuple[Scene, Sidecar]) -> None:
    scene, sidecar = checked
    scene.publish()
    scene.server.failing = {"complete"}
    with pytest.raises(EngineQuarantined, match="cannot compute"):
        sidecar.step()


@pytest.fixture
def recorded(scene: Scene) -> Iterator[tuple[Scene, Sidecar]]:
    """A scene whose sidecar compares versions with recorded tokens. Nothing is recorded yet."""
    scene.server.one_call = True
    with contextlib.closing(scene.start(canary="recorded")) as sidecar:
        yield scene, sidecar


def test_a_record_that_comes_after_the_version_is_compared_then(recorded: tuple[Scene, Sidecar]) -> None:
    scene, sidecar = recorded
    seq = scene.publish()
    sidecar.step()
    sidecar.step()
    assert [event["canary"] for event in named(scene, "canary-passed")] == ["self"]
    assert [event["reason"] for event in named(scene, "canary-missing")] == ["nothing is recorded for this version yet"]
    with open_log(scene) as log:
        assert record_canary(scene.server, log).record.target.seq == seq  # type: ignore[arg-type]
    sidecar.step()
    sidecar.step()
    assert [event["canary"] for event in named(scene, "canary-passed")] == ["self", "recorded"]


def test_a_server_that_computes_something_else_than_was_recorded_fails(recorded: tuple[Scene, Sidecar]) -> None:
    scene, sidecar = recorded
    scene.publish()
    sidecar.step()
    seq = scene.publish()
    with open_log(scene) as log:
        commit = log.read(seq)
        assert commit is not None
        put_canary(log, commit, generate(scene.server))  # type: ignore[arg-type]
    scene.server.completions.shift = -0.3  # prompts and decoding are equally wrong
    with pytest.raises(EngineQuarantined, match="recorded ones"):
        sidecar.step()
    assert scene.server.name == QUARANTINED_LABEL


def test_a_record_that_cannot_be_used_does_not_stop_a_server(recorded: tuple[Scene, Sidecar]) -> None:
    scene, sidecar = recorded
    seq = scene.publish()
    with open_store(scene.folder / "store") as store:
        store.put(keys.canary_key(seq), b"{}")
    sidecar.step()
    assert [event["canary"] for event in named(scene, "canary-passed")] == ["self"]
    assert "canary record" in str(named(scene, "canary-missing")[0]["reason"])


def test_a_version_is_recorded_only_from_a_server_that_has_it(checked: tuple[Scene, Sidecar]) -> None:
    scene, _ = checked
    server: Any = scene.server
    later = scene.publish()
    with open_log(scene) as log:
        commit = log.read(later)
        assert commit is not None
        with pytest.raises(EngineRefused, match=rf"not version 2 \(commit {later}\)\. Leave out --at"):
            record_canary(server, log, commit)
        server.name = "77"
        with pytest.raises(VersionUnknown):
            record_canary(server, log)
        server.name = "default"  # it was started with the newest version
        with pytest.raises(EngineRefused, match=r"Name the version that it was started with \(--at VERSION\)\.$"):
            record_canary(server, log)
        complete = server.complete
        server.complete = lambda body: (setattr(server, "name", "1"), complete(body))[1]
        with pytest.raises(EngineUnavailable, match="while tokens were recorded"):
            record_canary(server, log, commit)
        server.complete, server.name = complete, "default"
        assert read_canary(log, commit) is None
        assert record_canary(server, log, commit).record == read_canary(log, commit)
        server.name, server.commit, server.completions.stale = str(later), scene.hash_of(later), 0.5
        with pytest.raises(DecodingDiffers):
            record_canary(server, log)
        server.paused = True
        with pytest.raises(EngineRefused, match="paused"):
            record_canary(server, log)


def test_a_version_of_another_chain_with_the_same_number_is_not_recorded(checked: tuple[Scene, Sidecar], tmp_path: Path) -> None:
    scene, _ = checked
    server: Any = scene.server
    with open_store(tmp_path / "other") as store:
        with Publisher(store) as publisher:
            publisher.publish({"w": scene.weights})
        log = ChainLog(store)
        commit = log.read(int(server.name))
        assert commit is not None
        for named in (None, commit):
            with pytest.raises(EngineRefused, match="of another chain") as caught:
                record_canary(server, log, named)
            assert str(caught.value).endswith("Name the chain that its sidecar follows.")
        assert read_canary(log, commit) is None
        server.status = unanswered
        with pytest.raises(EngineRefused, match="which chain"):
            record_canary(server, log)


def unanswered() -> Any:
    raise RouteFailed("/collective_rpc", 500, "no such method")


def test_a_wrong_record_is_named_as_a_cause_and_can_be_replaced(recorded: tuple[Scene, Sidecar]) -> None:
    scene, sidecar = recorded
    server: Any = scene.server
    scene.publish()
    sidecar.step()
    with open_log(scene) as log:
        server.completions.shift = -0.3
        wrong = record_canary(server, log)
        server.completions.shift = 0.0
        kept = record_canary(server, log)
        assert (wrong.was_there, kept.was_there, kept.record) == (False, True, wrong.record)
        with pytest.raises(EngineQuarantined):
            sidecar.step()
        for _ in range(2):
            with pytest.raises(DecodingDiffers, match=r"record is wrong: .*deltawire canary --replace"):
                sidecar.step()
        commit = log.read(wrong.record.target.seq)
        assert commit is not None
        server.name, server.commit, server.paused = str(commit.seq), scene.hash_of(commit.seq), False  # a healthy server
        right = record_canary(server, log, replace=True)
        assert not right.was_there
        assert read_canary(log, commit) == right.record != wrong.record
    with contextlib.closing(scene.start(canary="recorded")) as other:
        other.step()
    assert named(scene, "canary-passed")[-1]["canary"] == "recorded"


def test_the_command_tells_that_a_version_was_recorded_before(
    checked: tuple[Scene, Sidecar], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scene, _ = checked
    monkeypatch.setattr(scene.server, "close", lambda: None, raising=False)
    monkeypatch.setattr("deltawire.engines.vllm.driver.routes.VllmRoutes", lambda url: scene.server)
    SigningKey.generate().save(tmp_path / "key")
    command = ["canary", str(scene.folder / "store"), "--engine", "http://127.0.0.1:8000"]
    first = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(first.stdout)["recorded_before"] is False, first.output
    again = CliRunner().invoke(app, [*command, "--sign", str(tmp_path / "key")])
    assert "was recorded before, unsigned; the key was not used" in " ".join(again.output.split())
    replaced = CliRunner().invoke(app, [*command, "--sign", str(tmp_path / "key"), "--replace", "--json"])
    assert (json.loads(replaced.stdout)["recorded_before"], json.loads(replaced.stdout)["signed"]) == (False, True)
