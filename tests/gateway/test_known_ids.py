"""A gateway knows its own ids after a restart, even if it was killed at any step, and reads the store as far back as windows need."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from forked_python import forked_run
from gateway_scene import AwayStore, gateway, serving
from live_samples import INTERACTIONS, PLAIN, RUN, SESSION
from scripted_engine import ScriptedEngine
from tiny_policy import TinyPolicy

import deltawire.gateway.recording.id_log as module
from deltawire.gateway.recording.id_log import IdLog, OwnId
from deltawire.gateway.recording.known_ids import KnownIds
from deltawire.store import Store, open_store
from deltawire.store.live_keys import INTERACTIONS as FILES
from deltawire.store.live_keys import LiveKey, interactions_key

SCRIPT = Path(__file__).with_name("killed_id_log.py")


def session(number: int) -> str:
    return f"gateway.{number:016x}"


def restarted(folder: Path, number: int, most: int = 1000) -> list[str]:
    """Return the ids that another session finds, and close it."""
    log = IdLog(folder, session(number), most=most)
    log.close()
    return [own.id for own in log.found]


def filled(folder: Path, number: int, names: list[str], most: int = 1000) -> None:
    log = IdLog(folder, session(number), most=most)
    for name in names:
        log.add(OwnId(name, "e" if name == "b" else None, None))
    log.close()


def test_ids_are_known_after_restarts_and_their_files_do_not_grow_in_number(tmp_path: Path) -> None:
    filled(tmp_path, 0, ["a", "b"])
    filled(tmp_path, 1, ["c"])
    log = IdLog(tmp_path, session(2), most=1000)
    assert log.found == [OwnId("a", None, None), OwnId("b", "e", None), OwnId("c", None, None)]
    names = {path.name for path in (tmp_path / "ids").iterdir()}
    assert names == {"lock", *(f"{session(2)}.{ending}" for ending in ("lock", "log", "old"))}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "ids").iterdir()} == {0o600}
    assert (tmp_path / "ids").stat().st_mode & 0o777 == 0o700
    log.close()


def test_the_newest_ids_are_kept_and_the_files_are_bounded(tmp_path: Path) -> None:
    names = [str(number) for number in range(100)]
    filled(tmp_path, 0, names, most=10)
    rows = sum(path.read_bytes().count(b"\n") for path in (tmp_path / "ids").iterdir())
    assert 10 <= rows <= 20
    assert restarted(tmp_path, 1, most=10) == names[-10:]
    for number in range(2, 10):
        assert restarted(tmp_path, number, most=10) == names[-10:]


def test_the_ids_of_a_gateway_that_runs_stay_its_own(tmp_path: Path) -> None:
    log = IdLog(tmp_path, session(0), most=1000)
    log.add(OwnId("a", None, None))
    assert restarted(tmp_path, 1) == ["a"]
    log.add(OwnId("b", None, None))
    log.close()
    assert restarted(tmp_path, 2) == ["a", "b"]


@pytest.mark.parametrize("damage", [b"x", b"0" * 16 + b'["c",null,null]\n', b"\n", b"\xff" * 10_000])
def test_a_damaged_end_is_cut_off(damage: bytes, tmp_path: Path) -> None:
    filled(tmp_path, 0, ["a", "b"])
    with (tmp_path / "ids" / f"{session(0)}.log").open("ab") as file:
        file.write(damage)
    assert restarted(tmp_path, 1) == ["a", "b"]
    filled(tmp_path, 2, ["d"])
    assert restarted(tmp_path, 3) == ["a", "b", "d"]


def test_a_full_disk_leaves_no_half_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = IdLog(tmp_path, session(0), most=1000)
    log.add(OwnId("a", None, None))
    real, calls = os.write, []

    def full(descriptor: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "no space left")
        return real(descriptor, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "write", full)
        with pytest.raises(OSError, match="no space"):
            log.add(OwnId("b", None, None))
    log.add(OwnId("c", None, None))
    log.close()
    assert restarted(tmp_path, 1) == ["a", "c"]


def test_no_kept_id_is_lost_when_gateways_are_killed_at_any_step(tmp_path: Path) -> None:
    kept: list[str] = []
    for step in range(60):
        ran = forked_run("torch", [SCRIPT, tmp_path, session(step), 1000, 3, step % 14], stdout=subprocess.PIPE)
        assert ran.returncode < 0
        kept += [name for name in ran.stdout.split() if name != "done"]
    assert len(kept) > 60
    found = restarted(tmp_path, 99)
    assert set(found) >= set(kept)
    assert len(found) == len(set(found))


def test_feedback_is_taken_before_the_store_has_the_answer_of_a_gateway_that_ended(policy: TinyPolicy, tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as inner, serving(ScriptedEngine(str(policy.first.seq)).serve) as engine:
        away = AwayStore(inner, FILES)
        with gateway(away, tmp_path, engine) as scene:
            name = scene.chat()[2]["x-deltawire-inference-id"]
        with gateway(away, tmp_path, engine) as scene:
            assert not scene.interactions()
            assert scene.post("/feedback", {"inference_id": name, "metric_name": "thumbs", "value": True})[0] == 200
            away.is_away = False
            scene.wait_for(name)


def test_the_store_is_read_as_far_back_as_the_longest_window(store: Store, tmp_path: Path) -> None:
    store.put(interactions_key(LiveKey(SESSION, 3, blake3(INTERACTIONS.to_bytes()).hexdigest())), INTERACTIONS.to_bytes())
    days = 30 * 86400.0
    window = 0.0
    known = KnownIds(store, RUN, session(0), most=10, longest=lambda: window)
    known._start = time.time() + days  # so the file is thirty days old
    known._reader = known._read_from(since=known._start - known._reach)
    known.refresh()
    assert known.inference(PLAIN.id) is None
    window = days + 60.0
    known.refresh()
    assert known.inference(PLAIN.id) is not None


def test_older_ids_do_not_replace_newer_ones(store: Store) -> None:
    known = KnownIds(store, "run", session(0), most=2)
    for name, age in (("a", 5.0), ("b", 4.0), ("old", 9.0)):
        known.add(name, name, None, age=age)
    assert known.inference("old") is None
    assert known.episode("old", None) is None
    before: Any = known.episode("b", None)
    known.add("b", "b", None, age=100.0)
    assert known.inference("b").since < before.since  # type: ignore[union-attr]
    assert known.episode("b", None) == before  # its newest interaction counts
    known.add("c", "c", None)
    assert [known.inference(name) is None for name in "abc"] == [True, False, False]
