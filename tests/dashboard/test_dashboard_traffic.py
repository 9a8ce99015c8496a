"""Live traffic on the page: answers by version and channel, and feedback by age. Reading is bounded, and hostile files change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from gated_chain import Answered, GatedChain

from deltawire.dashboard import Observer
from deltawire.dashboard import newest_files as files_module
from deltawire.dashboard import traffic_scan as scan_module
from deltawire.errors import DeltawireError
from deltawire.format.feedback import Feedback
from deltawire.format.interactions import AnswerFacts
from deltawire.format.live_parts import MAX_NUMBER
from deltawire.store import live_keys
from deltawire.store.live_keys import LiveKey
from deltawire.testing import Before, FaultyStore

SECOND = 1_000
EPISODE = "0190a0b0-c0d0-4000-9000-000000000001"
ASKED = 0x0190A0B0C0D0
"""The milliseconds that the ids of answers hold."""


@pytest.fixture
def chain() -> GatedChain:
    return GatedChain()


@pytest.fixture
def observer(chain: GatedChain) -> Iterator[Observer]:
    with Observer(chain.store) as opened:
        yield opened


def traffic(observer: Observer) -> dict[str, Any]:
    assert observer.look(), observer.problem
    found = observer.sections()["traffic"]
    assert isinstance(found, dict)
    return found


def rows(section: dict[str, Any]) -> dict[tuple[str | None, int], int]:
    return {(one["channel"], one["seq"]): one["count"] for one in section["answers"]}


def opinion(chain: GatedChain, metric: str, value: bool | float | str, seconds: float, **about: Any) -> Feedback:
    """Feedback that came this long after its answer was asked for."""
    return Feedback(chain.new_id(), metric, value, time=int(ASKED + seconds * SECOND), **about)


def test_answers_are_counted_by_version_and_channel(chain: GatedChain, observer: Observer) -> None:
    chain.answer([Answered("canary", 3), Answered("canary", 3, facts=AnswerFacts(7, refusal=True)), Answered("stable", 2)])
    chain.answer([Answered(None, 2), Answered("stable", 3)])
    found = traffic(observer)
    assert rows(found) == {("canary", 3): 2, ("stable", 3): 1, (None, 2): 1, ("stable", 2): 1}
    first = found["answers"][0]
    assert (first["channel"], first["version"], first["tokens"], first["refusals"], first["mixed"]) == ("canary", 3, 10, 1, 0)
    assert sum(number for _, _, number in found["times"]) == 5
    assert {channel for _, channel, _ in found["times"]} == {"canary", "stable", None}
    assert found["left_out"] == found["damaged"] == 0
    chain.answer([Answered("canary", 3)])
    assert rows(traffic(observer))["canary", 3] == 3, "a later look counts only what is new"
    assert rows(traffic(observer))["canary", 3] == 3


def test_feedback_is_counted_by_the_age_of_its_answer(chain: GatedChain, observer: Observer) -> None:
    (first,) = chain.answer([Answered("stable", 2)])
    ages = [0, 9, 10, 300, 4000, 90_000]
    chain.put_feedback([opinion(chain, "solved", index % 2 == 0, age, inference=first) for index, age in enumerate(ages)])
    chain.put_feedback([opinion(chain, "comment", "fine", 30, inference=first), opinion(chain, "rating", 0.25, -5, inference=first)])
    found = {one["metric"]: one for one in traffic(observer)["feedback"]}
    assert found["solved"]["ages"] == [2, 1, 1, 0, 1, 0, 1]
    assert (found["solved"]["count"], found["solved"]["mean"]) == (6, 0.5)
    assert (found["comment"]["mean"], found["comment"]["ages"]) == (None, [0, 1, 0, 0, 0, 0, 0])
    assert found["rating"]["ages"][0] == 1, "a clock that went back makes no answer younger than new"


def test_feedback_on_an_episode_has_the_age_of_its_newest_answer(chain: GatedChain, observer: Observer) -> None:
    chain.answer([Answered("stable", 2, episode=EPISODE)])  # the gateway answered it at time 0
    late = Feedback(chain.new_id(), "rating", 1.0, episode=EPISODE, time=120 * SECOND)
    chain.put_feedback([late, Feedback(chain.new_id(), "rating", 1.0, episode=EPISODE, caller="other", time=0)])
    (found,) = traffic(observer)["feedback"]
    assert (found["ages"], found["unknown"]) == ([0, 0, 1, 0, 0, 0, 0], 1)


def test_a_run_without_live_traffic_costs_one_request(observer: Observer, chain: GatedChain) -> None:
    chain.store.delete([info.key for info in chain.store.list(live_keys.LIVE)])
    first = traffic(observer)
    assert (first["answers"], first["feedback"], observer.sections()["gates"]) == ([], [], [])
    before = len(chain.store.calls)
    observer.look()
    assert [call.key for call in chain.store.calls[before:] if call.key.startswith(live_keys.LIVE)] == [live_keys.LIVE]


def test_a_look_without_news_reads_little(chain: GatedChain, observer: Observer) -> None:
    chain.answer([Answered("stable", 2, True)] * 50)
    observer.look()
    before = observer.read_bytes
    for _ in range(5):
        start = observer.requests
        observer.look()
        assert observer.requests - start < 20
    assert observer.read_bytes - before < 20_000


def test_of_many_files_only_the_newest_are_read(chain: GatedChain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "MOST_FILES", 4)
    for _ in range(300):
        chain.answer([Answered("stable", 2)])
    swept = [info.key for info in chain.store.list(live_keys.INTERACTIONS)][:100]
    chain.store.delete(swept)
    chain.answer([Answered("canary", 3)])
    before = len(chain.store.calls)
    with Observer(chain.store) as observer:
        found = traffic(observer)
        assert rows(found) == {("stable", 2): 3, ("canary", 3): 1}
        assert found["left_out"] == 201 - 4
        assert sum(call.key.startswith(live_keys.INTERACTIONS) for call in chain.store.calls[before:]) < 40
        for _ in range(10):
            chain.answer([Answered("canary", 3)])
        found = traffic(observer)
        assert (rows(found)["canary", 3], found["left_out"]) == (5, 197 + 6)


def test_large_files_are_left_out(chain: GatedChain, monkeypatch: pytest.MonkeyPatch) -> None:
    chain.answer([Answered("stable", 2)])
    size = max(info.size for info in chain.store.list(live_keys.INTERACTIONS))
    chain.answer([Answered("stable", 2)] * 200)
    monkeypatch.setattr(scan_module, "MOST_FILE_BYTES", size)
    with Observer(chain.store) as observer:
        found = traffic(observer)
        assert (rows(found), found["left_out"]) == ({("stable", 2): 1}, 1)


def test_files_of_several_sessions_are_found_and_new_sessions_too(chain: GatedChain, observer: Observer) -> None:
    chain.answer([Answered("stable", 2, True)])
    assert rows(traffic(observer)) == {("stable", 2): 1}
    chain.session, chain._numbers = "east.0123456789abcdef", {"interactions": 0, "feedback": 0}
    chain.answer([Answered("stable", 2, True)])
    for _ in range(files_module._SESSIONS_EVERY):
        found = traffic(observer)
    assert (rows(found), found["feedback"][0]["count"]) == ({("stable", 2): 2}, 2)


def test_a_store_that_fails_at_any_call_costs_no_answer_and_counts_none_twice(chain: GatedChain) -> None:
    chain.answer([Answered("stable", 2, True)] * 3)
    chain.answer([Answered("canary", 3, False)] * 2)
    for index in range(1000):
        faulty = FaultyStore(chain.store, [Before(index, "unavailable")])
        with Observer(faulty) as observer:
            for _ in range(2 * files_module._SESSIONS_EVERY):
                observer.look()
            found = observer.sections()["traffic"]
            assert rows(found) == {("stable", 2): 3, ("canary", 3): 2}
            assert [one["count"] for one in found["feedback"]] == [5]
            if observer.requests < index:
                break
        if index > 60:
            break


def hostile_files(chain: GatedChain) -> Iterator[tuple[str, bytes]]:
    """Objects that no gateway writes, at places where the page looks."""
    (good,) = chain.store.list(live_keys.INTERACTIONS)
    data = chain.store.get(good.key, limit=1 << 20)
    for place in range(0, len(data), 37):
        yield good.key, data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]
    yield good.key, b""
    yield good.key, data[:8]
    yield good.key, b"\xff" * 64
    yield live_keys.INTERACTIONS + "zzz", data
    yield live_keys.INTERACTIONS + f"{chain.session}/zzz", data
    yield live_keys.INTERACTIONS + f"{chain.session}/-", data
    yield live_keys.interactions_key(LiveKey(chain.session, MAX_NUMBER, "0" * 64)), data
    yield live_keys.interactions_key(LiveKey("a.0123456789abcdef", 0, good.key[-68:-4])), data
    yield live_keys.feedback_key(LiveKey(chain.session, 0, "0" * 64)), b'{"deltawire":"feedback"}' + b"[" * 5000
    yield live_keys.gate_key("canary", 0, 0), b"{" * 1000
    yield live_keys.GATES + "canary/x", b""
    yield live_keys.GATES + "canary", b""


def test_hostile_files_count_nothing_and_break_nothing(chain: GatedChain) -> None:
    chain.answer([Answered("stable", 2)])
    seen = 0
    for key, data in list(hostile_files(chain)):
        before = {info.key: chain.store.get(info.key, limit=1 << 20) for info in chain.store.list(live_keys.LIVE)}
        chain.store.put(key, data)
        with Observer(chain.store) as observer:
            assert observer.look(), (key, observer.problem)
            assert observer.look(), (key, observer.problem)
            sections = observer.sections()
            assert rows(sections["traffic"]) in ({("stable", 2): 1}, {})
            assert len(json.dumps(sections["traffic"])) < 5000
            if sections["traffic"]["damaged"]:
                seen += 1
                assert any("of live traffic" in fault["text"] for fault in sections["faults"])
        chain.store.delete([key])
        for name, good in before.items():
            chain.store.put(name, good)
    assert seen > 10


def test_files_of_another_run_count_nothing(chain: GatedChain, observer: Observer) -> None:
    (first,) = chain.answer([Answered("stable", 2)])
    chain.put_feedback([Feedback(chain.new_id(), "solved", True, inference=first)], run="ef" * 16)
    found = traffic(observer)
    assert (found["damaged"], found["feedback"]) == (1, [])
    assert "another run" in found["problem"]


def test_what_is_kept_is_bounded(chain: GatedChain, observer: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "MOST_ROWS", 3)
    monkeypatch.setattr(scan_module, "MOST_TIMES", 2)
    monkeypatch.setattr(scan_module, "_MOST_COUNTS", 3)
    monkeypatch.setattr(scan_module, "_MOST_EPISODES", 1)
    (first,) = chain.answer([Answered("stable", 2)])
    for number in range(6):
        chain.pass_time(60)
        chain.answer([Answered(f"c{number}", 2, episode=chain.new_id()), Answered("stable", 2)])
        chain.put_feedback([Feedback(chain.new_id(), f"metric {number}", True, inference=first)])
        found = traffic(observer)
    assert {one["channel"] for one in found["answers"]} == {"stable", "c4", "c5"}
    assert [one["metric"] for one in found["feedback"]] == ["metric 3", "metric 4", "metric 5"]
    assert len({minute for minute, _, _ in found["times"]}) == 1
    chain.answer([Answered(f"d{number}", 2) for number in range(6)])
    assert traffic(observer)["times"] == [], "one minute with too many channels is not shown"


def test_sessions_are_read_up_to_a_limit(chain: GatedChain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MOST_SESSIONS", 3)
    for number in range(8):
        chain.session, chain._numbers = f"g{number}.0123456789abcdef", {"interactions": 0, "feedback": 0}
        chain.answer([Answered("stable", 2)])
    with Observer(chain.store) as observer:
        assert rows(traffic(observer)) == {("stable", 2): 3}


def test_a_look_after_an_error_says_why(chain: GatedChain) -> None:
    chain.answer([Answered("stable", 2)])
    faulty = FaultyStore(chain.store, [Before(lambda call: call.key.startswith(live_keys.INTERACTIONS), "unavailable", None)])
    with Observer(faulty) as observer:
        assert not observer.look()
        with pytest.raises(DeltawireError):
            observer.look(raising=True)
        assert observer.sections()["chain"]["version"] == 6, "everything else is shown as usual"
