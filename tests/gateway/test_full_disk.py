"""A journal whose disk is full or hangs, or that has no room for a row, loses nothing else and records nothing twice."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import gateway, rows_of, serving, wait_until
from scripted_engine import ScriptedEngine
from tiny_policy import TinyPolicy

import deltawire.gateway.recording.journal as module
import deltawire.gateway.recording.journal_log as log_module
from deltawire.gateway.recording.journal import Journal, ended_sessions
from deltawire.gateway.recording.journal_log import JournalDisk
from deltawire.store import Store

SESSION = "g.0123456789abcdef"


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"interactions": [{"id": name}], **more}


class FullDisk(JournalDisk):
    """Lets every write fail from a given one on, until `has_room` is set. Half of the first one is written."""

    def __init__(self, after: int) -> None:
        self.left, self.has_room = after, False

    def write(self, descriptor: int, data: Any) -> int:
        self.left -= 1
        if self.has_room or self.left >= 0:
            return super().write(descriptor, data)
        if self.left == -1:
            return super().write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "no space left")


@pytest.mark.parametrize("after", range(5))
def test_an_answer_is_recorded_once_although_the_disk_is_full_at_any_write(after: int, tmp_path: Path) -> None:
    disk = FullDisk(after)
    journal = Journal(tmp_path, SESSION, disk=disk)
    recorded = []
    for name in ("a", "b"):
        try:
            journal.add_intent(name, {"id": name})
            journal.add_row(name, row(name))
        except OSError:
            break
    disk.has_room = True
    journal.rotate()
    for row_log in journal.ended_row_logs():  # they go to the store
        recorded += [each["interactions"][0]["id"] for each in rows_of(journal, row_log)]
        journal.forget_row_log(row_log)
    journal.close()
    for again in ended_sessions(tmp_path):
        recorded += list(again.open_intents)
        again.close()
    assert sorted(recorded) == ["a", "b"][: (after + 1) // 2]


def test_a_row_log_is_kept_while_the_marks_of_its_answers_cannot_be_written(tmp_path: Path) -> None:
    disk = FullDisk(2)
    journal = Journal(tmp_path, SESSION, disk=disk)
    journal.add_intent("a", {"id": "a"})
    journal.add_row("a", row("a"))
    with pytest.raises(OSError, match="no space"):
        journal.sync()
    journal.rotate()
    (row_log,) = journal.ended_row_logs()
    with pytest.raises(OSError, match="no space"):
        journal.forget_row_log(row_log)
    assert journal.ended_row_logs() == [row_log]
    disk.has_room = True
    journal.forget_row_log(row_log)
    assert journal.is_empty()
    journal.close()


def test_a_row_that_is_too_long_does_not_hide_those_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MOST_ROW", 1000)
    journal = Journal(tmp_path, SESSION)
    for name, size in (("a", 10), ("b", 2000), ("c", 10)):
        journal.add_intent(name, {"id": name})
        if size > 1000:
            with pytest.raises(ValueError, match="1,000 are allowed"):
                journal.add_row(name, row(name, more="x" * size))
            with pytest.raises(ValueError, match="1,000 are allowed"):
                journal.add_intent("d", {"id": "d", "more": "x" * size})
        else:
            journal.add_row(name, row(name))
    journal.close()
    (again,) = ended_sessions(tmp_path)
    (row_log,) = again.ended_row_logs()
    assert [each["interactions"][0]["id"] for each in rows_of(again, row_log)] == ["a", "c"]
    assert list(again.open_intents) == ["b"]
    again.close(remove=True)
    assert again.size == 0


def test_a_failed_compaction_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMPACT_BYTES", 0)
    journal = Journal(tmp_path, SESSION)
    for name in "abc":
        journal.add_intent(name, {"id": name})
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(journal._disk, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space left")))
    for name in "abc":
        journal.drop_intent(name)
        with pytest.raises(OSError, match="no space"):
            journal.sync()
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == before
    assert journal.is_empty()
    journal.close(remove=True)


def test_answers_go_on_without_a_record_while_the_disk_of_the_journal_hangs(
    policy: TinyPolicy, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltawire.gateway.recording.recorder._LONGEST_SYNC", 0.5)
    hangs, works, sync = threading.Event(), threading.Event(), JournalDisk.sync

    def hanging(disk: JournalDisk, descriptor: int) -> None:
        if hangs.is_set():
            works.wait()
        sync(disk, descriptor)

    monkeypatch.setattr(JournalDisk, "sync", hanging)
    engine = ScriptedEngine(str(policy.first.seq))
    with serving(engine.serve) as url, gateway(store, tmp_path, url) as scene:

        def is_recorded() -> bool:
            status, _, headers = scene.chat()
            assert status == 200
            names.append(headers["x-deltawire-inference-id"])
            return scene.post("/feedback", {"inference_id": names[-1], "metric_name": "thumbs", "value": True})[0] == 200

        names: list[str] = []
        wait_until(is_recorded, "an answer that is recorded")
        first = names[-1]
        hangs.set()
        try:
            wait_until(lambda: not is_recorded(), "an answer that is not recorded")  # each one that is recorded leads to a sync
            lost = names[-1]
            (event,) = [event for event in scene.events if event.name == "recording-stopped"][-1:]
            assert "has not finished a sync" in event.fields["reason"]
        finally:
            hangs.clear()
            works.set()
        wait_until(is_recorded, "an answer that is recorded again")
        scene.wait_for(first, names[-1])
        assert lost not in scene.ids()
