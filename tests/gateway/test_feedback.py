"""Feedback is acknowledged only when it is stored, counts once, and is refused with a named error if it is about nothing."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gateway_scene import AwayStore, Scene, gateway, stored_feedback, wait_until
from hypothesis import given
from hypothesis import strategies as st

from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import GatewayBusy, GatewayError, RequestMalformed, UnusableKeys
from deltawire.format.feedback import Feedback
from deltawire.format.live_parts import new_inference_id, new_session
from deltawire.format.records.live_records import Metric, Metrics
from deltawire.gateway.feedback import FeedbackIntake, read_feedback
from deltawire.gateway.http.api_keys import Caller
from deltawire.gateway.http.bodies import dump, parse_object
from deltawire.gateway.otlp import read_results
from deltawire.live import send_feedback
from deltawire.store import Store, open_store
from deltawire.store.live_keys import FEEDBACK, metrics_key

EPISODE = "0190a0b0-c0d0-4000-9000-000000000001"


def declare(store: Store) -> None:
    run = ReaderOptions().open_log(store).run.id
    metrics = (Metric("thumbs"), Metric("rating", "episode", "float", low=0.0, high=1.0), Metric("late", window=0))
    store.put_if_absent(metrics_key(0), Metrics(run, 0, "ab" * 16, metrics, 1).to_bytes())


@pytest.fixture
def answered(policy: object, engine: str, store: Store, tmp_path: Path) -> Iterator[tuple[Scene, str]]:
    """A gateway with declared metrics, and the id of an answer."""
    declare(store)
    with gateway(store, tmp_path, engine) as scene:
        yield scene, scene.chat(headers={"x-deltawire-episode-id": EPISODE})[1]["id"]


def told(scene: Scene, **body: object) -> tuple[int, object]:
    status, answer, _ = scene.post("/feedback", body)
    return status, answer["error"]["type"] if "error" in answer else answer["feedback_id"]


def test_feedback_is_in_the_store_when_it_is_acknowledged_and_counts_once(answered: tuple[Scene, str]) -> None:
    scene, name = answered
    status, first = told(scene, inference_id=name, metric_name="thumbs", value=True, tags={"page": "1"})
    assert status == 200
    (file,) = stored_feedback(scene.store)
    (one,) = file.feedback
    assert (one.id, one.metric, one.value, one.inference, one.tags) == (
        first,
        "thumbs",
        True,
        name.removeprefix("chatcmpl-"),
        {"page": "1"},
    )
    own = str(uuid.uuid4())
    for _ in range(3):
        assert told(scene, inference_id=name[9:], metric_name="thumbs", value=False, feedback_id=own, revision=1) == (200, own)
    assert told(scene, inference_id=name, metric_name="thumbs", value=True, feedback_id=own, revision=1) == (409, "FeedbackConflict")
    assert told(scene, episode_id=EPISODE, metric_name="rating", value=1)[0] == 200
    assert told(scene, inference_id=name, metric_name="comment", value="gut")[0] == 200
    assert told(scene, inference_id=name, metric_name="thumbs", value=True, dryrun=True)[0] == 200
    tried = {"inference_id": name, "metric_name": "thumbs", "value": True}
    assert scene.post("/feedback", {**tried, "dryrun": True})[1]["dryrun"] is True
    keyed = [
        scene.post("/feedback", {"inference_id": name, "metric_name": "thumbs", "value": True}, {"idempotency-key": "k"}) for _ in "ab"
    ]
    assert keyed[0][1] == keyed[1][1]
    found = [each for file in stored_feedback(scene.store) for each in file.feedback]
    assert [(each.metric, each.value) for each in found] == [
        ("thumbs", True),
        ("thumbs", False),
        ("rating", 1.0),
        ("comment", "gut"),
        ("thumbs", True),
    ]
    assert [file.number for file in stored_feedback(scene.store)] == list(range(len(stored_feedback(scene.store))))


def test_the_age_of_an_answer_is_told_when_feedback_comes(answered: tuple[Scene, str]) -> None:
    scene, name = answered
    hour = new_inference_id(int(time.time() * 1000) - 3_600_000)
    given_to = {"thumbs": name, "comment": name, "rating": EPISODE}
    for metric, target in given_to.items():
        field = "episode_id" if target == EPISODE else "inference_id"
        assert told(scene, **{field: target, "metric_name": metric, "value": "x" if metric == "comment" else True})[0] == 200
    assert told(scene, inference_id=hour, metric_name="thumbs", value=True)[0] == 404, "the age of an unknown answer counts nowhere"

    def ages() -> dict[object, float]:
        found = [event.fields for event in scene.events if event.name == "feedback-acknowledged"]
        return {each["metric"]: float(str(each["age_seconds"])) for each in found}

    wait_until(lambda: len(ages()) == 3, "ages of all feedback")
    assert ages().keys() == {"thumbs", None, "rating"}, "a metric that is not declared has no name"
    assert all(0.0 <= age < 3600.0 for age in ages().values())
    text = scene.get("/metrics")[1].decode()
    assert 'deltawire_feedback_age_seconds_count{metric="thumbs"} 1.0' in text
    assert 'deltawire_gateway_version_answers_total{channel="",seq="' in text


def test_feedback_about_nothing_or_with_a_wrong_value_is_refused_by_name(answered: tuple[Scene, str]) -> None:
    scene, name = answered
    good = {"inference_id": name, "metric_name": "thumbs", "value": True}
    for change, status, error in (
        ({"inference_id": new_inference_id(0)}, 404, "InteractionUnknown"),
        ({"inference_id": str(uuid.uuid4())}, 404, "InteractionUnknown"),
        ({"inference_id": "../../etc"}, 400, "RequestMalformed"),
        ({"inference_id": 7}, 400, "RequestMalformed"),
        ({"episode_id": EPISODE}, 400, "RequestMalformed"),
        ({"inference_id": None, "episode_id": EPISODE}, 400, "RequestMalformed"),  # the metric is about an inference
        ({"inference_id": None, "episode_id": str(uuid.uuid4())}, 404, "InteractionUnknown"),
        ({"inference_id": None}, 400, "RequestMalformed"),
        ({"value": 0.5}, 400, "RequestMalformed"),
        ({"value": "yes"}, 400, "RequestMalformed"),
        ({"value": None}, 400, "RequestMalformed"),
        ({"value": [1]}, 400, "RequestMalformed"),
        ({"metric_name": ""}, 400, "RequestMalformed"),
        ({"metric_name": "other", "value": 1e10}, 400, "RequestMalformed"),
        ({"metric_name": "other", "value": "x" * 5000}, 400, "RequestMalformed"),
        ({"revision": -1}, 400, "RequestMalformed"),
        ({"tags": {"a": 1}}, 400, "RequestMalformed"),
        ({"tags": {str(n): "" for n in range(17)}}, 400, "RequestMalformed"),
        ({"feedback_id": "no"}, 400, "RequestMalformed"),
        ({"reward": 1}, 400, "RequestMalformed"),
    ):
        assert told(scene, **{**good, **change}) == (status, error), change
    assert stored_feedback(scene.store) == []
    with pytest.raises(RequestMalformed, match="thumbs"):
        send_feedback(scene.url, name, "thumbs", 0.5)
    assert send_feedback(scene.url, name, "thumbs", True) == stored_feedback(scene.store)[0].feedback[0].id


def test_feedback_after_the_window_is_refused(answered: tuple[Scene, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import deltawire.gateway.feedback as module

    scene, name = answered
    monkeypatch.setattr(module, "_LATE_SECONDS", 1e9)
    assert told(scene, inference_id=name, metric_name="late", value=True)[0] == 200  # the gateway's clock alone decides nothing
    monkeypatch.setattr(module, "_LATE_SECONDS", -1.0)
    assert told(scene, inference_id=name, metric_name="late", value=True) == (410, "InteractionExpired")


def test_another_gateway_takes_feedback_on_an_answer_and_so_does_the_next_session(engine: str, store: Store, tmp_path: Path) -> None:
    with gateway(store, tmp_path / "a", engine) as first, gateway(store, tmp_path / "b", engine, name="other") as other:
        name = first.chat()[1]["id"][9:]
        first.wait_for(name)
        wait_until(lambda: told(other, inference_id=name, metric_name="thumbs", value=True)[0] == 200, "the id")
    with gateway(store, tmp_path / "a", engine) as again:
        wait_until(lambda: told(again, inference_id=name, metric_name="thumbs", value=False)[0] == 200, "the id")
    sessions = [file.gateway.partition(".")[0] for file in stored_feedback(store)]
    assert sorted(sessions) == ["gateway", "other"]


def test_callers_give_feedback_on_their_own_answers_unless_they_may_on_all(engine: str, store: Store, tmp_path: Path) -> None:
    keys = {name: f"sk-{name}" for name in ("app", "web", "judge")}
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
    lines = [f"app {digests['app']}", f"web {digests['web']} feedback", "# people", f"judge {digests['judge']} feedback all", ""]
    (tmp_path / "keys").write_text("\n".join(lines))
    with gateway(store, tmp_path, engine, keys=tmp_path / "keys") as scene:
        headers = {name: {"authorization": f"Bearer {key}"} for name, key in keys.items()}
        for wrong in ({}, {"authorization": "Bearer sk-ap"}, {"authorization": "sk-nobody"}, {"authorization": f"Bearer {digests['app']}"}):
            status, answer, more = scene.chat(headers=wrong)
            assert (status, answer["error"]["type"], more["www-authenticate"]) == (401, "KeyRefused", "Bearer")
        assert scene.chat(headers=headers["web"])[:2][0] == 401
        name = scene.chat(headers=headers["app"])[1]["id"]
        body = {"inference_id": name, "metric_name": "thumbs", "value": True}
        assert [scene.post("/feedback", body, headers[caller])[0] for caller in ("app", "web", "judge")] == [200, 404, 200]
        assert scene.post("/feedback", body)[0] == 401
        assert scene.get("/v1/models")[0] == 401
        assert scene.get("/healthz")[0] == 200
        assert [each.caller for file in stored_feedback(store) for each in file.feedback] == ["app", None]
        scene.wait_for(name[9:])
        assert scene.interactions()[0].interactions[0].caller == "app"
    (tmp_path / "keys").write_text("app deadbeef")
    with pytest.raises(UnusableKeys, match="line 1"), gateway(store, tmp_path, engine, keys=tmp_path / "keys"):
        pass


def test_feedback_waits_for_the_store_and_is_stored_in_order_without_gaps(engine: str, tmp_path: Path, policy: object) -> None:
    with open_store(tmp_path / "store") as inner:
        away = AwayStore(inner, FEEDBACK)
        with gateway(away, tmp_path, engine, store_seconds=0.2) as scene:
            name = scene.chat()[1]["id"]
            own = str(uuid.uuid4())
            status, answer, headers = scene.post(
                "/feedback", {"inference_id": name, "metric_name": "thumbs", "value": True, "feedback_id": own}
            )
            assert (status, answer["error"]["type"], headers["retry-after"]) == (503, "FeedbackNotStored", "1")
            assert stored_feedback(inner) == []
            away.is_away = False
            wait_until(lambda: told(scene, inference_id=name, metric_name="thumbs", value=True, feedback_id=own)[0] == 200, "the store")
        with gateway(inner, tmp_path, engine) as scene, ThreadPoolExecutor(16) as pool:
            scene.wait_for(name[9:])
            ids = list(pool.map(lambda n: send_feedback(scene.url, name, "rating", n / 100), range(64)))
        files = stored_feedback(inner)
        for session in {file.gateway for file in files}:
            numbers = [file.number for file in files if file.gateway == session]
            assert numbers == list(range(len(numbers)))
        assert sorted(each.id for file in files for each in file.feedback) == sorted([own, *ids])


def test_feedback_is_never_acknowledged_twice_with_different_contents_at_the_same_time(answered: tuple[Scene, str]) -> None:
    scene, name = answered
    own = str(uuid.uuid4())
    start = threading.Barrier(8)

    def send(number: int) -> int:
        start.wait()
        return told(scene, inference_id=name, metric_name="thumbs", value=bool(number % 2), feedback_id=own)[0]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(send, range(8)))
    (stored,) = [each for file in stored_feedback(scene.store) for each in file.feedback]
    assert found == [200 if bool(number % 2) == stored.value else 409 for number in range(8)]


def test_one_sender_takes_only_a_part_of_the_places_and_the_others_get_their_turn(store: Store) -> None:
    """The limits are 8,192 in all and 1,024 for each sender, and a file has 512."""
    name = new_inference_id(5)

    def feedback(caller: str | None) -> Feedback:
        return read_feedback({"inference_id": name, "metric_name": "thumbs", "value": True}, Caller(caller, feedback_on_all=False))

    async def run() -> None:
        intake = FeedbackIntake(store, "ab" * 16, new_session("gateway"), None, dict)  # type: ignore[arg-type]
        waiting = [asyncio.ensure_future(intake.store(feedback("app"), sender="app")) for _ in range(1024)]
        await asyncio.sleep(0)
        with pytest.raises(GatewayBusy, match="of the caller app"):
            await intake.store(feedback("app"), sender="app")
        waiting += [asyncio.ensure_future(intake.store(feedback("web"), sender="web")) for _ in range(2)]
        waiting += [asyncio.ensure_future(intake.store(feedback(None))) for _ in range(2000)]  # without keys there is no sender
        await asyncio.sleep(0)
        intake.start()
        await asyncio.gather(*waiting)
        await intake.close()

    asyncio.run(run())
    files = [[one.caller for one in file.feedback] for file in stored_feedback(store)]
    assert files[0][:6] == ["app", "web", None, "app", "web", None]
    assert sorted(map(str, (caller for file in files for caller in file))) == ["None"] * 2000 + ["app"] * 1024 + ["web"] * 2


def test_results_of_one_request_wait_for_the_store_in_pieces(
    engine: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    honest = FeedbackIntake._next_file

    def next_file(self: FeedbackIntake) -> object:
        waited.append(sum(map(len, self._waiting.values())))
        return honest(self)

    monkeypatch.setattr(FeedbackIntake, "_next_file", next_file)
    with gateway(store, tmp_path, engine) as scene:
        target = {"key": "gen_ai.response.id", "value": {"stringValue": scene.chat()[1]["id"]}}
        named = {"key": "gen_ai.evaluation.name", "value": {"stringValue": "thumbs"}}
        score = {"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": 1}}
        unnamed = {"eventName": "gen_ai.evaluation.result", "attributes": [target]}
        records = [{**unnamed, "timeUnixNano": str(n), "attributes": [target, named, score]} for n in range(1000)] + [unnamed]
        status, answer, _ = scene.post("/v1/logs", {"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]})
        assert (status, answer["partialSuccess"]["rejectedLogRecords"]) == (200, "1")
    assert sum(len(file.feedback) for file in stored_feedback(store)) == 1000
    assert max(waited) <= 256


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(["inference_id", "episode_id", "metric_name", "value", "tags", "feedback_id", "revision", "dryrun"])


def status_of(read: Callable[[], object]) -> int:
    """Return 200, or the status of the named error."""
    try:
        read()
    except GatewayError as error:
        return error.status
    return 200


@given(st.dictionaries(NAMES, JSON | st.just(new_inference_id(5)), max_size=8))
def test_feedback_of_any_shape_is_read_or_refused_by_name(body: dict[str, object]) -> None:
    assert status_of(lambda: read_feedback(body, Caller())) in (200, 400, 404)


@given(st.binary(max_size=200) | st.builds(dump, JSON), st.sampled_from(["application/json", "application/x-protobuf"]), st.booleans())
def test_bodies_of_any_shape_are_read_or_refused_by_name(body: bytes, kind: str, is_traces: bool) -> None:
    assert status_of(lambda: parse_object(body)) in (200, 400)
    assert status_of(lambda: read_results(body, kind, is_traces=is_traces)) in (200, 400)
