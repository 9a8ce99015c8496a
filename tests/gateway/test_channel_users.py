"""Users of one API key are users, requests that fail blame no engine, and records say to which channel a user belongs."""

from __future__ import annotations

import contextlib
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gateway_scene import Scene, gateway, serving, wait_until
from scripted_engine import ScriptedEngine
from tiny_policy import TinyPolicy

from deltawire.chain.channels import channel_of
from deltawire.chain.reader_options import ReaderOptions
from deltawire.format.interactions import Interaction
from deltawire.format.records.channel_records import ChannelMove
from deltawire.gateway import proxy
from deltawire.publish.channels import ChannelWriter
from deltawire.store import Store

APP, OTHER = {"authorization": "Bearer app-key"}, {"authorization": "Bearer other-key"}
EPISODE = "0190a0b0-c0d0-4000-9000-{:012x}".format


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("".join(f"{name} {hashlib.sha256(f'{name}-key'.encode()).hexdigest()}\n" for name in ("app", "other")))
    return path


@contextlib.contextmanager
def two_channels(policy: TinyPolicy, store: Store, folder: Path, **options: object):  # type: ignore[no-untyped-def]
    """Yield the engines of stable and canary, a gateway before them, and the move of the canary, which has half of the users."""
    second = policy.publish(1)
    log = ReaderOptions().open_log(store)
    commits = [log.read(version.seq) for version in (policy.first, second)]
    ChannelWriter(log, "stable").promote(commits[0])
    move = ChannelWriter(log, "canary").promote(commits[1], share=500_000)
    stable, canary = (ScriptedEngine(str(commit.seq)) for commit in commits)
    with contextlib.ExitStack() as running:
        old, new = (running.enter_context(serving(engine.serve)) for engine in (stable, canary))
        scene = running.enter_context(gateway(store, folder, f"stable={old}", f"canary={new}", **options))
        wait_until(lambda: scene.get("/healthz")[1]["up"] == 2, "both engines")
        user = name_of(move, "canary")
        wait_until(lambda: scene.chat(headers=APP, user=user)[2]["x-deltawire-channel"] == "canary", "the channel of the canary")
        yield stable, canary, scene, move


def name_of(move: ChannelMove, channel: str | None) -> str:
    return next(name for name in map("user {}".format, range(99)) if channel_of(name, [move]) == channel)


def recorded(scene: Scene, *answers: tuple[int, object, dict[str, str]]) -> list[Interaction]:
    names = [headers["x-deltawire-inference-id"] for _, _, headers in answers]
    scene.wait_for(*names)
    found = {one.id: one for file in scene.interactions() for one in file.interactions}
    return [found[name] for name in names]


def test_users_of_one_key_are_split_by_user_then_by_episode_then_by_request(
    policy: TinyPolicy, store: Store, tmp_path: Path, keys: Path
) -> None:
    with two_channels(policy, store, tmp_path, keys=keys) as (_, _, scene, move):
        alone = [scene.chat(headers=APP) for _ in range(40)]
        assert {headers["x-deltawire-channel"] for _, _, headers in alone} == {"stable", "canary"}
        for _, _, headers in alone:
            assert headers["x-deltawire-channel"] == (channel_of(headers["x-deltawire-inference-id"], [move]) or "stable")
        for episode in map(EPISODE, range(8)):
            _, _, headers = scene.chat(headers={**APP, "x-deltawire-episode-id": episode})
            assert headers["x-deltawire-channel"] == (channel_of(episode, [move]) or "stable")
        assert {one.user for one in recorded(scene, *alone)} == {None}
        named = [scene.chat(headers=key, user=user) for key in (APP, OTHER) for user in ("ann", "ann", "bob")]
        users = [one.user for one in recorded(scene, *named)]
        assert users[0] == users[1]
        assert users[3] == users[4]
        assert len(set(users)) == 4  # the same name is another user for another caller …
        assert named[0][2]["x-deltawire-channel"] == named[3][2]["x-deltawire-channel"]  # … in the same channel


def test_an_answer_of_another_channel_names_the_channel_of_its_user(policy: TinyPolicy, store: Store, tmp_path: Path, keys: Path) -> None:
    with two_channels(policy, store, tmp_path, keys=keys) as (_, canary, scene, move):
        ann, bob = name_of(move, "canary"), name_of(move, None)
        before = scene.chat(headers=APP, user=ann)
        canary.script = [500]
        failed = scene.chat(headers=APP, user=ann)
        canary.label = "99"  # a version that was never on its channel
        wait_until(lambda: scene.chat(headers=APP, user=ann)[2]["x-deltawire-channel"] == "stable", "the gateway notices")
        away, other = scene.chat(headers=APP, user=ann), scene.chat(headers=APP, user=bob)
        found = [(one.channel, one.diverted_from) for one in recorded(scene, before, failed, away, other)]
        assert found == [("canary", None), ("stable", "canary"), ("stable", "canary"), ("stable", None)]


def test_a_request_that_the_own_channel_refuses_is_tried_there_again_before_another_channel_answers(
    policy: TinyPolicy, store: Store, tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_FIRST_PAUSE", 0.0)
    with two_channels(policy, store, tmp_path, keys=keys) as (_, canary, scene, move):
        ann = name_of(move, "canary")
        for script in ([503], [429, 502, 503, 504, 429]):
            canary.script = [*script]
            assert scene.chat(headers=APP, user=ann)[2]["x-deltawire-channel"] == "canary"
            assert not canary.script
        canary.script = [503] * 10
        before = len(canary.asked)
        diverted = scene.chat(headers=APP, user=ann)
        assert len(canary.asked) == before + 1 + proxy._OWN_TRIES
        assert [(one.channel, one.diverted_from) for one in recorded(scene, diverted)] == [("stable", "canary")]


def test_an_answer_with_status_500_keeps_no_engine_from_other_requests(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    engines = [ScriptedEngine(str(policy.first.seq)) for _ in range(2)]
    with serving(engines[0].serve) as one, serving(engines[1].serve) as other, gateway(store, tmp_path, one, other) as scene:
        wait_until(lambda: scene.get("/healthz")[1]["up"] == 2, "both engines")
        for engine in engines:
            engine.script = [500, 500]
        status, answer, _ = scene.chat()
        assert (status, answer["error"]["message"]) == (500, "scripted")
        assert sum(len(engine.asked) for engine in engines) == 3
        assert min(len(engine.asked) for engine in engines) == 1
        assert "engine-away" not in scene.names()
        assert scene.get("/healthz")[1]["up"] == 2


def test_a_caller_with_too_many_requests_keeps_nobody_out(policy: TinyPolicy, store: Store, tmp_path: Path, keys: Path) -> None:
    engine = ScriptedEngine(str(policy.first.seq))
    with serving(engine.serve) as url, gateway(store, tmp_path, url, keys=keys, requests_per_caller=2) as scene:
        wait_until(lambda: scene.get("/healthz")[1]["up"] == 1, "the engine")
        engine.script = ["wait", "wait"]
        with ThreadPoolExecutor(2) as pool:
            try:
                waiting = [pool.submit(scene.chat, headers=APP) for _ in range(2)]
                wait_until(lambda: len(engine.asked) == 2, "two requests")
                status, answer, headers = scene.chat(headers=APP)
                assert (status, answer["error"]["type"], headers["retry-after"]) == (429, "GatewayBusy", "1")
                assert "the caller app has 2 requests at once" in answer["error"]["message"]
                assert scene.chat(headers=OTHER)[0] == 200
            finally:
                engine.go_on.set()
            assert [one.result()[0] for one in waiting] == [200, 200]
        assert scene.chat(headers=APP)[0] == 200
