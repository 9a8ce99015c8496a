"""A gateway is killed by SIGKILL at every step. Nothing that it acknowledged is lost, and nothing is recorded twice."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_python import ForkedPopen
from gateway_scene import AwayStore, gateway, rows_of, stored_feedback, stored_interactions, wait_until
from tiny_policy import TinyPolicy

from deltawire.gateway.recording.journal import Journal, ended_sessions
from deltawire.store import Store, open_store
from deltawire.store.live_keys import INTERACTIONS

SCRIPT = Path(__file__).with_name("killed_gateway.py")


@contextlib.contextmanager
def process(store: Path, journal: Path, engine: str, step: int, when: str) -> Iterator[tuple[Any, str]]:
    arguments = [str(SCRIPT), str(store), str(journal), engine, str(step), when]
    with ForkedPopen("torch", arguments, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield running, running.stdout.readline().strip()
        finally:
            running.kill()


def post(url: str, body: dict[str, Any]) -> Any:
    """Return the whole answer, or None if the gateway died before it was complete."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            data = answer.read()
            return data, answer.headers
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return None


def ask(url: str, number: int, acknowledged: list[str], told: list[str]) -> bool:
    """Ask, streamed or not, and send feedback on the answer. Returns whether the gateway still lives."""
    body = {"model": "policy", "messages": [{"role": "user", "content": f"w{number}"}], "max_tokens": 3, "stream": bool(number % 2)}
    answer = post(f"{url}/v1/chat/completions", body)
    if answer is None or (number % 2 and not answer[0].endswith(b"[DONE]\n\n")):
        return False
    name = answer[1]["x-deltawire-inference-id"]
    acknowledged.append(name)
    feedback = str(uuid.uuid4())
    if post(f"{url}/feedback", {"inference_id": name, "metric_name": "thumbs", "value": True, "feedback_id": feedback}) is None:
        return False
    told.append(feedback)
    return True


@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_acknowledged_is_lost_and_nothing_is_recorded_twice(
    when: str, engine: str, policy: TinyPolicy, store: Store, tmp_path: Path
) -> None:
    acknowledged: list[str] = []
    told: list[str] = []
    for step in range(20):  # two answers make about sixteen steps, and the sessions before this one leave more
        with process(tmp_path / "store", tmp_path / "journal", engine, step, when) as (running, url):
            number = 0
            while url and ask(url, number, acknowledged, told):
                number += 1
            assert running.wait() != 0
    assert acknowledged
    assert told
    with gateway(store, tmp_path, engine) as scene:
        scene.wait_for(*acknowledged)
        wait_until(lambda: len(list((tmp_path / "journal").glob("*.*/lock"))) == 1, "the journals of all sessions that ended")
    counts = Counter(one.id for file in stored_interactions(store) for one in file.interactions)
    assert set(acknowledged) <= counts.keys()
    assert set(counts.values()) == {1}
    for kind in (stored_interactions(store), stored_feedback(store)):
        for session in {file.gateway for file in kind}:
            numbers = [file.number for file in kind if file.gateway == session]
            assert numbers == list(range(len(numbers)))
    assert set(told) <= {each.id for file in stored_feedback(store) for each in file.feedback}
    assert not list((tmp_path / "journal").glob("*.*"))[1:]  # only the key for hashes of users is left


def test_answers_go_on_while_the_store_is_away_and_recording_stops_when_the_journal_is_full(
    engine: str, policy: TinyPolicy, tmp_path: Path
) -> None:
    with open_store(tmp_path / "store") as inner:
        away = AwayStore(inner, INTERACTIONS)
        with gateway(away, tmp_path, engine, journal_bytes=6000) as scene:
            first = scene.chat()[2]["x-deltawire-inference-id"]
            while "recording-stopped" not in scene.names():
                assert scene.chat()[0] == 200
            name = scene.chat()[2]["x-deltawire-inference-id"]
            assert stored_interactions(inner) == []
            wait_until(lambda: "recording-waits" in scene.names(), "a failed upload")
            status, answer, _ = scene.post("/feedback", {"inference_id": name, "metric_name": "thumbs", "value": True})
            assert (status, answer["error"]["type"]) == (404, "InteractionUnknown")  # it is not recorded
            away.is_away = False
            scene.wait_for(first)
            wait_until(lambda: "recording-resumed" in scene.names(), "recording")
            scene.wait_for(scene.chat()[2]["x-deltawire-inference-id"])
            assert name not in scene.ids()


def test_a_session_in_use_is_not_taken_and_damaged_rows_end_a_log(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "g.0123456789abcdef")
    assert list(ended_sessions(tmp_path)) == []
    row = {"interactions": [{"id": "a"}]}
    journal.add_intent("a", {"id": "a"})
    journal.add_intent("b", {"id": "b"})
    journal.add_row("a", row)
    journal.sync()
    journal.close()
    for name, cut in (("intents.log", 3), ("rows-0000000000.log", 0)):
        path = tmp_path / "g.0123456789abcdef" / name
        path.write_bytes(path.read_bytes()[: -cut or None] + b"r\xff\xff")
    (again,) = ended_sessions(tmp_path)
    assert list(again.open_intents) == ["b"]  # the mark of "a" is damaged, but its row is there
    assert [rows_of(again, row_log) for row_log in again.ended_row_logs()] == [[row]]
    again.drop_intent("b")
    (file,) = again.seal(0, [(7, b"data")])
    again.close()
    (once_more,) = ended_sessions(tmp_path)
    assert once_more.files() == [file]
    assert [rows_of(once_more, row_log) for row_log in once_more.ended_row_logs()] == [[]]  # the second user wrote nothing
    assert once_more.sealed_row_logs() == [0]
    once_more.forget_row_log(0)
    once_more.forget_row_log(1)
    once_more.forget_file(file)
    assert once_more.is_empty()
    once_more.close()
    (last,) = ended_sessions(tmp_path)
    assert not last.open_intents  # "a" is done for good, although its mark and its row are gone
    last.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_the_log_of_intents_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import deltawire.gateway.recording.journal as module

    monkeypatch.setattr(module, "_COMPACT_BYTES", 1000)
    journal = Journal(tmp_path, "g.0123456789abcdef")
    for number in range(500):
        journal.add_intent(str(number), {"id": str(number)})
        if number % 50:
            journal.drop_intent(str(number))
        journal.sync()
    assert journal.size < 4000
    journal.close()
    (again,) = ended_sessions(tmp_path)
    assert list(again.open_intents) == [str(number) for number in range(0, 500, 50)]
    again.close()
