"""Staging finds what differs between two versions of a mirror. These tests need neither vLLM nor torch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from deltawire import Publisher, Subscriber
from deltawire.engines.vllm.mirror.staging import Stager, find_changes
from deltawire.errors import MirrorError
from deltawire.format.checkpoints.checkpoint import Checkpoint


def checkpoint(folder: Path, **tensors: np.ndarray) -> Checkpoint:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint(folder)


def test_changes_are_found_by_bits(tmp_path: Path) -> None:
    zeros = np.zeros(6, np.float32)
    other = zeros.copy()
    other[1], other[4] = -0.0, np.nan
    norm = np.ones((2, 3), ml_dtypes.bfloat16)
    old = checkpoint(tmp_path / "old", a=zeros, b=norm)
    new = checkpoint(tmp_path / "new", a=other, b=norm)
    changes = find_changes(old, new)
    assert changes is not None
    assert list(changes) == ["a"]
    assert changes["a"].indices.tolist() == [1, 4]
    assert changes["a"].values.tolist() == other.view(np.uint32)[[1, 4]].tolist()


def test_checkpoints_with_other_tensors_are_not_compared(tmp_path: Path) -> None:
    old = checkpoint(tmp_path / "old", a=np.zeros(6, np.float32))
    assert find_changes(old, checkpoint(tmp_path / "shape", a=np.zeros((2, 3), np.float32))) is None
    assert find_changes(old, checkpoint(tmp_path / "type", a=np.zeros(6, np.int32))) is None
    assert find_changes(old, checkpoint(tmp_path / "more", a=np.zeros(6, np.float32), b=np.zeros(1, np.float32))) is None


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    with Publisher(tmp_path / "store") as publisher:
        yield publisher


def test_an_update_is_staged_from_the_version_that_the_worker_has(tmp_path: Path, publisher: Publisher) -> None:
    weights = np.arange(1000, dtype=np.float32)
    first = publisher.publish({"w": weights})
    stager = Stager(tmp_path / "mirror", str(tmp_path / "store"))
    start = stager.take(first.seq, None)
    assert start.changes is None
    weights[[3, 700]] = -1
    second = publisher.publish({"w": weights})
    stager.prepare(second.seq, start.target)
    update = stager.take(second.seq, start.target)
    assert update.base == start.target.ref
    assert update.changes is not None
    assert update.changes["w"].indices.tolist() == [3, 700]
    assert start.target.weights["w"][3] == 3  # the worker's version does not change while it is held
    start.target.release()
    update.target.release()
    stager.close()


def test_the_staging_thread_unmaps_a_released_version(tmp_path: Path, publisher: Publisher) -> None:
    version = publisher.publish({"w": np.zeros(10, np.float32)})
    stager = Stager(tmp_path / "mirror", str(tmp_path / "store"))
    held = stager.take(version.seq, None).target
    unmapped_by: list[str] = []
    for shard in held.weights.shards:
        weakref.finalize(shard.map, lambda: unmapped_by.append(threading.current_thread().name))
    del shard
    busy = threading.Event()
    stager._worker.submit(busy.wait)
    stager.release(held)  # returns although the staging thread is busy
    assert not unmapped_by
    busy.set()
    stager._worker.submit(int).result()
    assert unmapped_by == ["deltawire-stage_0"]  # although this test still has a reference
    with pytest.raises(ValueError, match="was released"):
        _ = held.weights
    stager.close()


def test_without_a_url_only_the_version_of_the_mirror_can_be_staged(tmp_path: Path, publisher: Publisher) -> None:
    version = publisher.publish({"w": np.zeros(10, np.float32)})
    stager = Stager(tmp_path / "mirror")
    with pytest.raises(MirrorError, match="no sound version"):
        stager.take(version.seq, None)
    with Subscriber(tmp_path / "store", tmp_path / "mirror") as subscriber:
        subscriber.sync()
    with pytest.raises(MirrorError, match="is at commit"):
        stager.take(version.seq + 1, None)
    stager.prepare(version.seq + 1, None)
    while stager.error is None:
        pass
    assert stager.staged is None
    stager.take(version.seq, None).target.release()
    stager.close()


def test_a_staged_update_that_is_not_taken_is_released(tmp_path: Path, publisher: Publisher) -> None:
    weights = np.zeros(10, np.float32)
    stager = Stager(tmp_path / "mirror")
    with Subscriber(tmp_path / "store", tmp_path / "mirror") as subscriber:
        for value in range(1, 6):
            weights[0] = value
            version = publisher.publish({"w": weights})
            subscriber.sync()
            stager.prepare(version.seq, None)
    stager.close()
    assert len(list((tmp_path / "mirror" / "slots").iterdir())) <= 3
