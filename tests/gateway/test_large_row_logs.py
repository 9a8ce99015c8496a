"""While the store is away for long, answers wait in row logs that fit into one file each. Larger ones become several files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from gateway_scene import AwayStore, Scene, gateway, serving, stored_interactions, wait_until
from scripted_engine import ScriptedEngine
from tiny_policy import TinyPolicy

import deltawire.format.interactions as format_module
import deltawire.gateway.recording.journal as module
from deltawire.gateway.recording.uploads import Uploads
from deltawire.store import Store
from deltawire.store.live_keys import INTERACTIONS


def answers(scene: Scene, count: int) -> list[str]:
    return [scene.chat()[2]["x-deltawire-inference-id"] for _ in range(count)]


def row_counts(journal: Path) -> list[int]:
    """Return how many rows each row log has."""
    return [path.read_bytes().count(b'"completions":') for path in sorted(journal.glob("*/rows-*.log"))]


def sizes(store: Store) -> list[int]:
    return [len(file.interactions) for file in stored_interactions(store)]


def check(store: Store, names: list[str]) -> None:
    files = stored_interactions(store)
    assert Counter(one.id for file in files for one in file.interactions) == Counter(names)
    assert [file.number for file in files] == list(range(len(files)))


def test_answers_that_wait_for_the_store_become_files_of_bounded_size(
    policy: TinyPolicy, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 3)
    away = AwayStore(store, INTERACTIONS)
    engine = ScriptedEngine(str(policy.first.seq))
    with serving(engine.serve) as url, gateway(away, tmp_path, url) as scene:
        names = answers(scene, 1)
        wait_until(lambda: "recording-waits" in scene.names(), "a failed upload")
        names += answers(scene, 10)
        away.is_away = False
        scene.wait_for(*names)
    check(store, names)
    assert max(sizes(store)) <= 3


@pytest.mark.parametrize("limit", ["rows", "bytes", "interactions", "file"])
def test_a_row_log_that_is_too_large_for_one_file_becomes_several(
    limit: str, policy: TinyPolicy, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(str(policy.first.seq))
    with serving(engine.serve) as url:
        with monkeypatch.context() as without_uploads:
            without_uploads.setattr(Uploads, "step", lambda self: None)
            with gateway(store, tmp_path, url) as scene:
                names = answers(scene, 11)
        assert row_counts(tmp_path / "journal") == [11]
        if limit == "rows":
            monkeypatch.setattr(module, "MOST_ROWS", 3)
        elif limit == "bytes":
            (log,) = (tmp_path / "journal").glob("*/rows-*.log")
            monkeypatch.setattr(module, "MOST_ROW_BYTES", log.stat().st_size * 3 // 10)
        elif limit == "interactions":
            monkeypatch.setattr(module, "MAX_INTERACTIONS", 3)
        else:  # rows that take more room in the file than in the journal
            monkeypatch.setattr(format_module, "MAX_INTERACTIONS_RECORD", 1500)
        with gateway(store, tmp_path, url) as scene:
            scene.wait_for(*names)
    check(store, names)
    assert len(sizes(store)) >= 4
    assert max(sizes(store)) <= 3
