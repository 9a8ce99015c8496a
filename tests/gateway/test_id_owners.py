"""Ids belong to the caller that uses them: nobody takes over an episode or feedback of another caller."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import Scene, gateway, serving, stored_feedback
from scripted_engine import ScriptedEngine
from tiny_policy import TinyPolicy

from deltawire.format.records.live_records import Metric
from deltawire.gateway import feedback as intake
from deltawire.gateway.http.api_keys import Caller
from deltawire.live import LiveTraffic
from deltawire.store import Store

EPISODE = "0190a0b0-c0d0-4000-9000-000000000001"
BODY = {"episode_id": EPISODE, "metric_name": "rating", "value": 1.0, "feedback_id": EPISODE}
RIGHTS = {"app": "", "web": "", "judge": "feedback all"}


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(intake, "_REFRESH_SECONDS", 0.0)  # so that every question is asked of the store
    path = tmp_path / "keys"
    path.write_text("\n".join(f"{name} {hashlib.sha256(name.encode()).hexdigest()} {rights}" for name, rights in RIGHTS.items()))
    return path


def asked(scene: Scene, caller: str) -> str:
    """Let a caller ask within the episode, and return the id of the answer when it is in the store."""
    status, _, headers = scene.chat(headers={"authorization": f"Bearer {caller}", "x-deltawire-episode-id": EPISODE})
    assert status == 200
    scene.wait_for(headers["x-deltawire-inference-id"])
    return headers["x-deltawire-inference-id"]


def rated(scene: Scene, sender: str, value: float, **more: Any) -> tuple[int, str | None]:
    body = {"episode_id": EPISODE, "metric_name": "rating", "value": value, **more}
    status, answer, _ = scene.post("/feedback", body, {"authorization": f"Bearer {sender}"})
    return status, answer.get("error", {}).get("type")


def ratings(store: Store) -> dict[str, float]:
    """Return the rating that each answer is joined with, as of a time when all windows are over."""
    traffic = LiveTraffic(store, metrics=[Metric("rating", "episode", "float", window=3600, low=0.0, high=1.0)])
    traffic.ripe()
    assert traffic._joiner is not None
    return {one.pending.id: one.values["rating"] for one in traffic._joiner.table.ripe(1e12)}


def test_an_episode_of_another_caller_is_another_episode(policy: TinyPolicy, store: Store, tmp_path: Path, keys: Path) -> None:
    same = str(uuid.uuid4())
    with serving(ScriptedEngine(str(policy.first.seq)).serve) as engine:
        with gateway(store, tmp_path, engine, keys=keys) as scene:
            first = asked(scene, "app")
            assert rated(scene, "web", 0.0) == (404, "InteractionUnknown")
            assert rated(scene, "judge", 0.5, feedback_id=same) == (200, None)  # one caller has it
            second = asked(scene, "web")
            assert rated(scene, "web", 0.0, feedback_id=same) == (200, None)  # its own episode, with an id that somebody used
            assert rated(scene, "app", 1.0, revision=1, feedback_id=str(uuid.uuid4())) == (200, None)
            assert rated(scene, "judge", 0.1) == (409, "EpisodeShared")
            assert rated(scene, "judge", 0.1, caller="nobody") == (404, "InteractionUnknown")
            assert rated(scene, "judge", 0.1, caller=7) == (400, "RequestMalformed")
            assert rated(scene, "web", 0.1, caller="app") == (404, "InteractionUnknown")
            assert rated(scene, "judge", 0.75, caller="web", revision=2) == (200, None)
        with gateway(store, tmp_path, engine, keys=keys) as again:  # it knows these episodes from the store
            assert rated(again, "judge", 0.1) == (409, "EpisodeShared")
            assert rated(again, "app", 0.9, revision=3) == (200, None)
    assert [one.caller for file in stored_feedback(store) for one in file.feedback].count(None) == 0
    assert ratings(store) == {first: 0.9, second: 0.75}


def test_an_episode_is_not_taken_over_through_another_gateway(policy: TinyPolicy, store: Store, tmp_path: Path, keys: Path) -> None:
    with (
        serving(ScriptedEngine(str(policy.first.seq)).serve) as engine,
        gateway(store, tmp_path / "a", engine, keys=keys) as west,
        gateway(store, tmp_path / "b", engine, keys=keys, name="east") as east,
    ):
        own = asked(west, "app")
        foreign = asked(east, "web")
        assert rated(east, "judge", 0.5) == (409, "EpisodeShared")  # also where the other caller never asked
        assert rated(west, "judge", 0.5) == (409, "EpisodeShared")
        assert rated(east, "web", 0.0, revision=9) == (200, None)
        assert rated(east, "app", 1.0) == (200, None)
        name = {"inference_id": own, "metric_name": "thumbs", "value": False}
        assert east.post("/feedback", name, {"authorization": "Bearer web"})[0] == 404
    assert ratings(store) == {own: 1.0, foreign: 0.0}


def test_feedback_of_two_callers_with_one_id_is_stored_in_two_files() -> None:
    waiting = intake.FeedbackIntake(None, "ab" * 16, "gw.0123456789abcdef", None, dict)  # type: ignore[arg-type]
    for caller in ("app", "web", "third"):
        feedback = intake.read_feedback(BODY, Caller(caller, feedback_on_all=False))
        waiting._waiting.setdefault("judge", []).append((feedback, None))  # type: ignore[arg-type]
    taken = [[feedback.caller for feedback, _ in waiting._next_file()[1]] for _ in range(3)]
    assert taken == [["app"], ["web"], ["third"]]
    assert waiting._waiting == {}
