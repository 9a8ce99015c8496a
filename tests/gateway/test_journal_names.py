"""A journal that is no directory, cannot be written or is shared under one name is named to the operator."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
from gateway_scene import gateway
from tiny_policy import TinyPolicy

from deltawire.events import Event
from deltawire.gateway import EngineAddress, GatewayOptions
from deltawire.gateway.http.memory import MemoryBudget
from deltawire.gateway.recording.journal import Journal, ended_sessions, sessions_in_use
from deltawire.gateway.recording.recorder import Recorder
from deltawire.store import Store

NOWHERE = "http://127.0.0.1:9"


def test_a_journal_that_is_a_file_is_named(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("")
    with pytest.raises(NotADirectoryError, match=f"the journal {path} is not a directory"), gateway(store, tmp_path, NOWHERE, journal=path):
        pass


def test_another_gateway_with_the_same_name_and_journal_is_told(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    def told(scene: object) -> list[str]:
        return [str(event.fields["session"]) for event in scene.events if event.name == "gateway-name-used"]  # type: ignore[attr-defined]

    with gateway(store, tmp_path, NOWHERE, name="one") as first, gateway(store, tmp_path, NOWHERE, name="one-b") as other:
        assert told(first) == told(other) == []
        with gateway(store, tmp_path, NOWHERE, name="one") as second:
            assert told(second) == [first.get("/healthz")[1]["session"]]
    with gateway(store, tmp_path, NOWHERE, name="one") as again:
        assert told(again) == []


def test_sessions_that_ended_are_not_in_use(tmp_path: Path) -> None:
    held, ended = Journal(tmp_path, "g.0123456789abcdef"), Journal(tmp_path, "g.0123456789abcdee")
    ended.close()
    (tmp_path / "user.key").write_bytes(b"")
    free = list(ended_sessions(tmp_path))
    assert sessions_in_use(tmp_path, "g", free) == ["g.0123456789abcdef"]
    assert sessions_in_use(tmp_path, "h", free) == []
    for journal in (held, *free):
        journal.close()


def test_a_gateway_leaves_the_journals_of_other_runs(tmp_path: Path) -> None:
    mine, other, old = "a" * 32, "b" * 32, None
    sessions = {mine: "g.000000000000000a", other: "g.000000000000000b", old: "g.000000000000000c"}
    for run, session in sessions.items():
        Journal(tmp_path, session, run=run).close()
    found = list(ended_sessions(tmp_path, run=mine))
    assert [journal.session for journal in found] == [sessions[mine], sessions[old]]  # an older release did not note the run
    held = [Journal(tmp_path, "g.000000000000000d", run=other), Journal(tmp_path, "g.000000000000000e", run=mine)]
    assert sessions_in_use(tmp_path, "g", found, run=mine) == ["g.000000000000000e"]
    for journal in [*found, *held]:
        journal.close()
    again = list(ended_sessions(tmp_path, run=other))
    assert [journal.session for journal in again] == [sessions[other], sessions[old], "g.000000000000000d"]
    for journal in again:
        journal.close()


def test_the_event_names_the_journal_whose_disk_is_full(tmp_path: Path) -> None:
    class Full:
        def drop_intent(self, name: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    events: list[Event] = []
    options = GatewayOptions([EngineAddress(NOWHERE)], journal=tmp_path / "journal")

    async def work() -> None:
        parts: list[object] = [None, Full(), (), None, None, options]
        recorder = Recorder(
            *parts,  # type: ignore[arg-type]
            memory=MemoryBudget(),
            user_hash=str,
            routers=lambda: None,
            on_event=events.append,
        )
        recorder.drop("a")

    asyncio.run(work())
    (event,) = events
    assert event.fields["reason"] == f"the journal {tmp_path / 'journal'} cannot be written: No space left on device"
