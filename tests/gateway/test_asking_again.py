"""The gateway asks an engine what it drew until the engine tells, for several answers at once, and in the way of nothing else."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import Scene, gateway, serving, wait_until
from scripted_engine import ScriptedEngine
from tiny_policy import TinyPolicy

import deltawire.engines.answer_table as table_module
import deltawire.gateway.recording.answer_queues as module
from deltawire.engines.answer_table import ANSWERS_ROUTE, MOST_LISTED, AnswerTable
from deltawire.gateway.engine_pool import EngineAnswer
from deltawire.gateway.http.memory import MemoryBudget
from deltawire.gateway.recording.answer_queues import AnswerQueues, Told, Waiting
from deltawire.store import Store


@pytest.fixture
def scripted(policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ScriptedEngine, str]]:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.002)
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.01)
    engine = ScriptedEngine(str(policy.first.seq))
    with serving(engine.serve) as url:
        yield engine, url


def names_of(scene: Scene, count: int) -> list[str]:
    return [scene.chat()[2]["x-deltawire-inference-id"] for _ in range(count)]


def wait_for_tries(engine: ScriptedEngine, count: int) -> None:
    before = len(engine.told)
    wait_until(lambda: len(engine.told) >= before + count, "more tries")


@pytest.mark.parametrize("status", [-1, 503, 401])
def test_an_engine_is_asked_until_it_tells_what_it_drew(
    status: int, scripted: tuple[ScriptedEngine, str], store: Store, tmp_path: Path
) -> None:
    engine, url = scripted
    with gateway(store, tmp_path, url) as scene:
        engine.answers_status = status
        names = names_of(scene, 5)
        wait_for_tries(engine, 30)
        assert scene.ids() == []
        engine.answers_status = 0
        scene.wait_for(*names)
        assert sorted(scene.ids()) == sorted(names)
        assert "interaction-unusable" not in scene.names()


def test_an_engine_that_cannot_be_asked_keeps_no_other_engine_waiting(
    scripted: tuple[ScriptedEngine, str], policy: TinyPolicy, store: Store, tmp_path: Path
) -> None:
    engine, url = scripted
    other = ScriptedEngine(str(policy.first.seq))
    with serving(other.serve) as other_url, gateway(store, tmp_path, url, other_url) as scene:
        engine.answers_status = -1
        for wanted, paused in ((engine, other), (other, engine)):
            wanted.running, paused.running = True, False
            while len(wanted.asked) < 5:
                scene.chat()
        wait_until(lambda: len(scene.ids()) == len(other.asked), "the answers of the other engine")
        assert "interaction-unusable" not in scene.names()
        engine.answers_status = 0
        wait_until(lambda: len(scene.ids()) == len(other.asked) + len(engine.asked), "the answers of both engines")


def test_an_answer_that_the_engine_does_not_have_any_more_is_given_up(
    scripted: tuple[ScriptedEngine, str], store: Store, tmp_path: Path
) -> None:
    engine, url = scripted
    with gateway(store, tmp_path, url) as scene:
        engine.answers_status = 503
        names = names_of(scene, 3)
        wait_for_tries(engine, 5)
        engine.table._drop(names[1])
        engine.answers_status = 0
        scene.wait_for(names[0], names[2])
        wait_until(lambda: "interaction-unusable" in scene.names(), "the lost answer")
        assert sorted(scene.ids()) == sorted([names[0], names[2]])


def test_the_next_start_asks_for_answers_that_the_engine_did_not_tell(
    scripted: tuple[ScriptedEngine, str], store: Store, tmp_path: Path
) -> None:
    engine, url = scripted
    with gateway(store, tmp_path, url) as scene:
        engine.answers_status = -1
        names = names_of(scene, 3)
        wait_for_tries(engine, 10)
    engine.answers_status = 0
    with gateway(store, tmp_path, url) as scene:
        scene.wait_for(*names)
        assert sorted(scene.ids()) == sorted(names)


@pytest.mark.parametrize("lists", [True, False], ids=["lists", "one at a time"])
def test_many_waiting_answers_are_recorded_whether_or_not_the_engine_tells_several_at_once(
    lists: bool, scripted: tuple[ScriptedEngine, str], store: Store, tmp_path: Path
) -> None:
    engine, url = scripted
    engine.lists = lists
    with gateway(store, tmp_path, url) as scene:
        engine.answers_status = -1
        names = names_of(scene, 12)
        wait_for_tries(engine, 3)
        engine.answers_status = 0
        scene.wait_for(*names)
        assert sorted(scene.ids()) == sorted(names)
        assert "interaction-unusable" not in scene.names()


def test_a_slow_rule_of_the_user_stops_no_answer_and_one_that_fails_loses_only_its_own(
    scripted: tuple[ScriptedEngine, str], store: Store, tmp_path: Path
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def redact(shown: Mapping[str, Any]) -> Mapping[str, Any]:
        begun.set()
        go_on.wait()
        if shown["messages"][0]["content"] == "bad":
            raise OSError("the rule failed")  # not an error of the journal
        return shown

    _, url = scripted
    with gateway(store, tmp_path, url, redact=redact) as scene:
        try:
            names = names_of(scene, 1)
            begun.wait()
            names += names_of(scene, 3)  # they are answered while the rule runs
            bad = scene.chat("bad")[2]["x-deltawire-inference-id"]
        finally:
            go_on.set()
        scene.wait_for(*names)
        wait_until(lambda: "interaction-unusable" in scene.names(), "the answer whose rule failed")
        assert bad not in scene.ids()
        assert "recording-stopped" not in scene.names()


def test_a_list_of_answers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    table = AnswerTable()
    for name in "abc":
        table.put(name, [{"choices": name * 100}], logprobs=None)
    monkeypatch.setattr(table_module, "_MOST_LIST_BYTES", 2 * len(table.get("a") or b""))

    def ask(query: str) -> Any:
        reply = table.reply(ANSWERS_ROUTE, query.encode())
        return None if reply is None else json.loads(reply)

    assert ask("ids=a,x,b,c") == {
        "deltawire": "answers",
        "version": 1,
        "answers": [json.loads(table.get(name) or b"") for name in "ab"],
        "left": ["c"],
    }
    monkeypatch.setattr(table_module, "_MOST_LIST_BYTES", 1)
    assert [each["id"] for each in ask("ids=c,a")["answers"]] == ["c"]  # there is always one, so asking again comes to an end
    assert ask("ids=" + ",".join("x" * (MOST_LISTED + 1))) is None
    assert ask("") is None
    assert table.reply(ANSWERS_ROUTE + "a", b"") == table.get("a")


class Pool:
    """Engines that tell everything at once, and whose answers need much memory."""

    def __init__(self, size: int, *, lists: bool = True) -> None:
        self.size, self.lists = size, lists
        self.asked: list[int] = []

    async def get(self, url: str, *, most: int, memory: Any) -> EngineAnswer:
        names = url.rpartition("/")[2].removeprefix("?ids=").split(",")
        self.asked.append(len(names))
        memory.add(self.size * len(names))
        await asyncio.sleep(0)
        if "?" in url and not self.lists:
            return EngineAnswer(404, "application/json", b"{}")
        return EngineAnswer(200, "application/json", b"{}")


@pytest.mark.parametrize("lists", [True, False], ids=["lists", "one at a time"])
@pytest.mark.parametrize("most", [1000, 5000, 100_000])
def test_answers_are_asked_for_in_lists_that_are_shorter_when_the_memory_is_small(
    most: int, lists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.0)
    pool, memory, recorded = Pool(500, lists=lists), MemoryBudget(most), list[str]()
    highest = 0

    async def record(asked: list[Waiting], told: Told | None) -> list[Waiting]:
        nonlocal highest
        highest = max(highest, memory.used)
        recorded.extend(one.name for one in asked)
        return []

    async def run() -> None:
        queues = AnswerQueues(pool, memory, record, lambda one, reason: recorded.append(reason))  # type: ignore[arg-type]
        for number in range(100):
            queues.add(Waiting(None, {"id": f"{number}", "engine": "http://e"}, lambda: None))  # type: ignore[arg-type]
        while len(recorded) < 100:
            await asyncio.sleep(0)
        await queues.close(1.0)

    asyncio.run(run())
    assert sorted(recorded, key=int) == [str(number) for number in range(100)]
    assert highest <= most
    assert memory.used == 0
    assert max(pool.asked) > 1
    if most == 100_000:
        assert (len(pool.asked) < 10) == lists
