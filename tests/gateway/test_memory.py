"""All requests together take a bounded amount of memory, and every way in which one ends releases its part."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import gzip
import hashlib
import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import AwayStore, Scene, gateway, serving, stored_feedback, wait_until
from scripted_engine import ScriptedEngine
from tiny_policy import TinyPolicy

from deltawire.errors import GatewayFull, RequestTooLarge
from deltawire.gateway.http.api_keys import Caller
from deltawire.gateway.http.bodies import parse_object
from deltawire.gateway.http.event_stream import mapped_events
from deltawire.gateway.http.memory import MemoryBudget, json_memory
from deltawire.gateway.http.requests import AskedFor
from deltawire.gateway.recording.inline_answers import InlineAnswer
from deltawire.store import Store, open_store
from deltawire.store.live_keys import FEEDBACK

LARGE = "w" * 100_000


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[MemoryBudget]:
    """The budgets of the gateways that a test starts."""
    made: list[MemoryBudget] = []

    def budget(most: int) -> MemoryBudget:
        made.append(MemoryBudget(most))
        return made[-1]

    monkeypatch.setattr("deltawire.gateway.server.MemoryBudget", budget)
    return made


def test_a_reservation_takes_nothing_if_it_does_not_fit() -> None:
    budget = MemoryBudget(100)
    with budget.reservation() as first, budget.reservation() as second:
        first.add(60)
        with pytest.raises(GatewayFull):
            second.add(41)
        with pytest.raises(RequestTooLarge):
            first.add(41)
        assert (budget.used, first.size, second.size) == (60, 60, 0)
        assert second.fits(40)
        assert not second.fits(1)
        first.resize(10)
        second.resize(90)
        first.hold()
        first.close()
        assert budget.used == 100
    assert budget.used == 0


def test_one_caller_reserves_at_most_half_of_the_memory() -> None:
    budget = MemoryBudget(100)
    with budget.reservation("app") as first, budget.reservation("web") as other, budget.reservation() as nameless:
        with pytest.raises(RequestTooLarge, match="of one caller"):
            first.add(51)
        first.add(30)
        with first.another() as second:
            with pytest.raises(GatewayFull, match="of the caller app"):
                second.add(21)
            second.add(20)
            assert not first.fits(1)
            other.add(50)
        with pytest.raises(GatewayFull, match="requests take 80"):
            nameless.add(21)
        nameless.add(20)
        assert budget.used_by == {"app": 30, "web": 50}
    assert (budget.used, budget.used_by) == (0, {})


def test_slow_requests_of_one_caller_leave_room_for_others(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("".join(f"{name} {hashlib.sha256(name.encode()).hexdigest()}\n" for name in ("app", "web")))
    app, web = ({"authorization": f"Bearer {name}"} for name in ("app", "web"))
    engine = ScriptedEngine(str(policy.first.seq))
    engine.script = ["wait"]
    with serving(engine.serve) as url, gateway(store, tmp_path, url, memory_bytes=1_200_000, keys=tmp_path / "keys") as scene:
        first = threading.Thread(target=scene.chat, args=(LARGE, app))
        first.start()
        wait_until(lambda: engine.asked, "the first request")
        status, answer, told = scene.chat(LARGE, app)
        assert (status, answer["error"]["type"], told["retry-after"]) == (503, "GatewayFull", "1")
        assert "of the caller app" in answer["error"]["message"]
        assert scene.chat(LARGE, web)[0] == 200
        assert scene.chat("w1", app)[0] == 200  # small ones fit
        engine.go_on.set()
        first.join()


SHAPES = [
    b'{"a":"' + b"x" * 1_000_000 + b'"}',
    '{"a":"{}😀"}'.replace("{}", "x" * 1_000_000).encode(),
    b'{"a":"' + b"x" * 1_000_000 + b'\\ud83d\\ude00"}',
    b'{"a":[' + b"[]," * 100_000 + b"0]}",
    b'{"a":[' + b'{"a":1},' * 100_000 + b"0]}",
    b'{"a":[' + b'"ab",' * 100_000 + b"0]}",
    b'{"a":[' + b"123456," * 100_000 + b"0]}",
    b'{"a":[' + b"-1.5," * 100_000 + b"0]}",
    b'{"a":{' + b",".join(b'"%d":{}' % number for number in range(100_000)) + b"}}",
]


@pytest.mark.parametrize("body", SHAPES, ids=lambda body: body[:16].decode(errors="replace"))
def test_parsing_takes_no_more_memory_than_is_reserved(body: bytes) -> None:
    tracemalloc.start()
    try:
        found = parse_object(body)
        assert found
        assert tracemalloc.get_traced_memory()[1] <= json_memory(body) + 65536  # the parser itself takes a little
    finally:
        tracemalloc.stop()


def test_requests_that_do_not_fit_into_the_memory_are_answered_later(
    policy: TinyPolicy, store: Store, tmp_path: Path, budgets: list[MemoryBudget]
) -> None:
    engine = ScriptedEngine(str(policy.first.seq))
    engine.script = ["wait"]
    found: list[Any] = []
    with serving(engine.serve) as url, gateway(store, tmp_path, url, memory_bytes=600_000) as scene:
        first = threading.Thread(target=lambda: found.append(scene.chat(LARGE)))
        first.start()
        wait_until(lambda: engine.asked, "the first request")
        for content, compressed in ((LARGE, False), (LARGE, True)):
            body: Any = {"model": "policy", "messages": [{"role": "user", "content": content}]}
            data, headers = (gzip.compress(json.dumps(body).encode()), {"content-encoding": "gzip"}) if compressed else (body, {})
            status, answer, told = scene.post("/v1/chat/completions", data, headers)
            assert (status, answer["error"]["type"], told["retry-after"]) == (503, "GatewayFull", "1")
        assert scene.chat("w1")[0] == 200  # small ones fit
        status, answer, _ = scene.chat("w" * 700_000)
        assert (status, answer["error"]["type"]) == (413, "RequestTooLarge")  # it would never fit
        engine.go_on.set()
        first.join()
        assert found[0][0] == 200
        wait_until(lambda: scene.chat(LARGE)[0] == 200, "the memory of the first request")
        wait_until(lambda: budgets[0].used == 0, "the memory of all requests")


def test_a_refused_body_is_read_to_its_end_so_that_its_sender_sees_the_answer(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    engine = ScriptedEngine(str(policy.first.seq))
    body = b"w" * (32 << 20)  # more than the buffers of a connection hold
    with serving(engine.serve) as url, gateway(store, tmp_path, url, memory_bytes=600_000) as scene:
        for path, status in (("/v1/chat/completions", 413), ("/feedback", 413), ("/v1/logs", 413)):
            assert scene.post(path, body)[0] == status
        assert scene.post("/v1/chat/completions", body, {"host": "elsewhere"})[0] == 421


def ways_to_end(scene: Scene, engine: ScriptedEngine) -> None:
    """Let requests end in each way that there is."""
    for stream in (False, True):
        for step in ("good", "break", "reset", 503, 400):
            engine.script = [step]
            scene.chat(LARGE, stream=stream)
        engine.script = ["reset"] * 3
        assert scene.chat(LARGE, stream=stream)[0] == 503
    assert scene.chat(LARGE, n=1000)[0] == 400
    assert scene.post("/v1/chat/completions", b"{" * 1000)[0] == 400
    assert scene.post("/feedback", b"[" * 1000)[0] == 400
    assert scene.post("/v1/logs", b"\xff" * 1000)[0] == 400
    assert scene.post("/v1/logs", {"resourceLogs": []})[0] == 200
    assert scene.get("/v1/models")[0] == 500  # the scripted engine has no such route


@pytest.mark.parametrize("memory_bytes", [1 << 30, 420_000])
def test_requests_release_their_memory_however_they_end(
    memory_bytes: int, policy: TinyPolicy, store: Store, tmp_path: Path, budgets: list[MemoryBudget]
) -> None:
    engine = ScriptedEngine(str(policy.first.seq))
    with serving(engine.serve) as url, gateway(store, tmp_path, url, memory_bytes=memory_bytes) as scene:
        if memory_bytes == 1 << 30:
            ways_to_end(scene, engine)
        else:  # the request fits, but its recording does not
            assert scene.chat(LARGE)[0] == 200
            wait_until(lambda: "interaction-unusable" in scene.names(), "the refused recording")
        wait_until(lambda: budgets[0].used == 0, "the memory of all requests")


@pytest.mark.parametrize("route", ["/feedback", "/v1/logs"])
def test_feedback_that_waits_for_the_store_keeps_its_memory(
    route: str, policy: TinyPolicy, tmp_path: Path, budgets: list[MemoryBudget]
) -> None:
    with open_store(tmp_path / "store") as inner, serving(ScriptedEngine(str(policy.first.seq)).serve) as engine:
        away = AwayStore(inner, FEEDBACK)
        with gateway(away, tmp_path, engine, memory_bytes=200_000, store_seconds=0.01) as scene:
            name = scene.chat()[2]["x-deltawire-inference-id"]
            scene.wait_for(name)
            wait_until(lambda: budgets[0].used == 0, "the memory of the answer")
            refused, sent = "FeedbackNotStored", 0
            while refused == "FeedbackNotStored":
                held = budgets[0].used
                status, answer, _ = scene.post(route, about(route, name, sent))
                assert status == 503
                refused, sent = answer["error"]["type"], sent + 1
                assert sent < 1000
            assert refused == "GatewayFull"
            assert sent > 2
            assert held > 100_000
            assert budgets[0].used == held  # nobody waits for an answer now
            away.is_away = False
            wait_until(lambda: budgets[0].used == 0, "the memory of feedback")
            assert len([one for file in stored_feedback(inner) for one in file.feedback]) == sent - 1


def about(route: str, name: str, number: int) -> Any:
    """Return the body of a request with feedback."""
    text = f"{number} {'x' * 4000}"
    if route == "/feedback":
        return {"inference_id": name, "metric_name": "comment", "value": text}
    told = {"gen_ai.evaluation.name": "comment", "gen_ai.response.id": name, "gen_ai.evaluation.score.label": text}
    attributes = [{"key": key, "value": {"stringValue": value}} for key, value in told.items()]
    record = {"eventName": "gen_ai.evaluation.result", "timeUnixNano": str(number), "attributes": attributes}
    return {"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}


def asked_with(budget: MemoryBudget) -> AskedFor:
    return AskedFor("chat", {}, Caller(), None, None, True, memory=budget.reservation())


def test_tokens_inside_an_answer_that_do_not_fit_are_not_recorded() -> None:
    budget = MemoryBudget(10_000)
    inline = InlineAnswer(asked_with(budget))
    value = {"choices": [{"index": 0, "token_ids": [5] * 100}]}
    inline.take(value)
    assert inline.calls()[0]["choices"][0]["token_ids"] == [5] * 100
    inline.take({"choices": [{"index": 0, "token_ids": [5] * 100}]})
    assert inline.calls() == []
    assert budget.used <= budget.most


def test_an_event_that_does_not_fit_ends_the_stream() -> None:
    budget = MemoryBudget(10_000)

    async def chunks() -> Any:
        yield b'data: {"a":1}\n\n'
        yield b'data: {"a":[' + b"[]," * 200
        yield b"0]}\n\n"

    async def read() -> list[bytes]:
        found: list[bytes] = []
        with budget.reservation() as memory:
            events = mapped_events(chunks(), lambda value: value, memory)
            found.append(await anext(events))
            with pytest.raises(RequestTooLarge):
                await anext(events)
        return found

    assert asyncio.run(read()) == [b'data: {"a":1}\n\n']
    assert budget.used == 0


def test_a_gateway_that_ends_with_the_interpreter_stores_what_it_has(
    policy: TinyPolicy, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(str(policy.first.seq))
    with serving(engine.serve) as url, gateway(store, tmp_path, url, flush=3600.0) as scene:
        name = scene.chat()[2]["x-deltawire-inference-id"]
        monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)  # as Python does before it waits for threads
    monkeypatch.undo()
    assert scene.ids() == [name]
