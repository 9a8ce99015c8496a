"""`deltawire events` tells what the store alone shows, once each, and only reads."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from forked_python import ForkedPopen, forked_run
from shown_run import ShownRun
from support import publish_fully, publisher_arguments

from deltawire import Publisher
from deltawire.chain.log import ChainLog
from deltawire.chain.records.reports import SERVING, put_report
from deltawire.errors import DeltawireError
from deltawire.events import Event
from deltawire.events.registry import check
from deltawire.fleet.overview import FleetReader
from deltawire.fleet.store_events import StoreEvents
from deltawire.format.records.member_records import Heartbeat
from deltawire.store import fleet_keys, keys
from deltawire.store.memory import MemoryStore
from deltawire.testing.faulty_store import Before, FaultyStore

WEIGHTS = {"w": np.arange(1000, dtype=np.float16)}


def looks(store: Any, count: int = 20) -> Any:
    log = ChainLog(store)
    seen = StoreEvents(log, FleetReader(store, log.run.id), count)

    def look() -> list[Event]:
        found = seen.look()
        for event in found:
            check(event.name, event.fields)
        return found

    return look


def publish(store: Any, *steps: int, **options: Any) -> None:
    with Publisher(store, **publisher_arguments(**options)) as publisher:
        for step in steps:
            publish_fully(publisher, {"w": WEIGHTS["w"] + np.float16(step)}, step=step)


def told(events: list[Event], name: str, *fields: str) -> list[tuple[Any, ...]]:
    return [tuple(event.fields.get(field) for field in fields) for event in events if event.name == name]


def test_commits_are_told_once_and_in_order() -> None:
    store = MemoryStore()
    publish(store, 0, 1, 2)
    look = looks(store)
    assert told(look(), "commit-seen", "kind", "step") == [("fence", None), ("anchor", 0), ("delta", 1), ("delta", 2)]
    assert look() == []
    publish(store, 3)
    assert told(look(), "commit-seen", "kind", "step", "void") == [("fence", None, 0), ("delta", 3, 0)]
    publish(store, 5, resume_from_seq=2)
    found = look()
    assert ("rewind", 2) in told(found, "commit-seen", "kind", "base")
    assert look() == []


def test_a_late_look_begins_with_the_newest_commits() -> None:
    store = MemoryStore()
    publish(store, *range(10))
    assert told(looks(store, 3)(), "commit-seen", "step") == [(7,), (8,), (9,)]


def test_shortcuts_engines_and_members_are_told_when_they_change() -> None:
    store = MemoryStore()
    publish(store, *range(6))
    look, run = looks(store), ChainLog(store).run
    found = look()
    assert told(found, "skip-seen", "seq", "base")
    put_report(store, run, "engine-1", SERVING, 3)
    put_report(store, run, "engine-1", SERVING, 4)
    beat = Heartbeat(run.id, "member-1", "0" * 32, "working", 4, 3, 2, 100, 50, (), 0)
    store.put(fleet_keys.member_key("member-1"), beat.to_bytes())
    found = look()
    assert told(found, "engine-seen", "reader", "state", "seq") == [("engine-1", SERVING, 4)]
    assert told(found, "member-seen", "member", "seq", "lag") == [("member-1", 4, 2)]
    store.put(fleet_keys.member_key("member-1"), beat.to_bytes())
    assert look() == []


def test_rounds_and_batches_are_told_once() -> None:
    shown = ShownRun(MemoryStore())
    look = looks(shown.store)
    look()
    shown.round(0, tasks=2)
    shown.round(1, tasks=3)
    assert told(look(), "round-seen", "round", "step", "tasks") == [(0, 1, 2), (1, 1, 3)]
    key = shown.deliver(0, 1)
    assert look() == []
    shown.acknowledge(0, {"member-1": key})
    assert told(look(), "batch-seen", "round", "step", "results") == [(0, 1, 1)]
    assert look() == []
    late = looks(shown.store)()  # a look that comes later tells both
    assert told(late, "round-seen", "round") == [(0,), (1,)]
    assert told(late, "batch-seen", "round", "step", "results") == [(0, 1, 1)]
    shown.close()


def test_a_batch_whose_list_is_missing_is_not_told() -> None:
    shown = ShownRun(MemoryStore())
    shown.round(0, tasks=2)
    shown.acknowledge(0, {"member-1": shown.deliver(0, 1)})
    (accepted,) = [info.key for info in shown.store.list("") if "/accepted/" in info.key]
    shown.store.delete([accepted])
    found = looks(shown.store)()
    assert told(found, "round-seen", "round") == [(0,)]
    assert told(found, "batch-seen", "round") == []
    shown.close()


def test_malformed_records_of_others_are_skipped() -> None:
    store = MemoryStore()
    publish(store, 0)
    for key in (keys.report_key("engine-1"), fleet_keys.member_key("member-1"), fleet_keys.round_key(0), fleet_keys.BOARD):
        store.put(key, b"\x00 not a record")
    assert {event.name for event in looks(store)()} == {"commit-seen"}


def test_after_any_request_that_failed_the_rest_is_told() -> None:
    inner = MemoryStore()
    publish(inner, 0, 1)
    faultless = FaultyStore(inner)
    expected = {event.name: dict(event.fields) for event in looks(faultless)()}
    for failing in range(len(faultless.calls)):
        store = FaultyStore(inner, [Before(failing, "unavailable")])
        found: list[Event] = []
        try:
            look = looks(store)
        except DeltawireError:
            look = looks(store)  # the run could not be read
        for _ in range(2):
            with contextlib.suppress(DeltawireError):
                found += look()
        assert told(found, "commit-seen", "step") == [(None,), (0,), (1,)], store.calls[failing]
        assert {event.name for event in found} == expected.keys()


def test_the_command_prints_json_and_ends(tmp_path: Path) -> None:
    publish(tmp_path / "chain", 0, 1)
    before = sorted(path for path in (tmp_path / "chain").rglob("*"))
    done = forked_run("light", ["-m", "deltawire.cli", "events", "--from", tmp_path / "chain", "--json"], stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()] == ["commit-seen"] * 3
    assert sorted(path for path in (tmp_path / "chain").rglob("*")) == before, "it only reads"


def test_the_command_follows_a_run(tmp_path: Path) -> None:
    publish(tmp_path / "chain", 0)
    arguments = ["events", "--from", tmp_path / "chain", "--follow", "--poll", "0.05"]
    with ForkedPopen("light", ["-m", "deltawire.cli", *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "fence" in process.stdout.readline()
        assert "step 0" in process.stdout.readline()
        publish(tmp_path / "chain", 1)
        assert "fence" in process.stdout.readline()
        assert "step 1" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


def test_without_a_chain_the_error_says_so(tmp_path: Path) -> None:
    done = forked_run("light", ["-m", "deltawire.cli", "events", "--from", tmp_path / "chain", "--json"], stdout=subprocess.PIPE)
    assert json.loads(done.stdout)["error"]["type"] == "NoChain"
    assert done.returncode == 1
