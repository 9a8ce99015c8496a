"""Real processes get a real SIGKILL at any moment. No acknowledged version is lost, and no incomplete version is served."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from journal import lines_of
from nursery import Nursery, state_of
from plain_reader import read_commits
from servers import Server, seaweedfs  # noqa: F401
from support import bits_of

import deltawire
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.publish import AnchorPolicy, Publisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import Store, open_store
from deltawire.subscribe import Subscriber, reading_mirror

KILLS = 50
_PATIENCE = 240.0


def wait_until(happened: Callable[[], bool], nursery: Nursery, child: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not happened():
        assert nursery.is_running(child), "the child ended by itself"
        assert time.monotonic() < deadline, "the child made no progress"
        time.sleep(0.002)


def kill_publishers(nursery: Nursery, url: str, journal: Path, kills: int) -> None:
    """Start and kill one publisher after the other. Half of them are killed while they open the run or soon after, the others later."""
    moments = random.Random(1)
    for number in range(kills):
        before = len(lines_of(journal))
        child = nursery.start("publish", url, journal)
        if number % 2:
            wait_until(lambda: len(lines_of(journal)) > before, nursery, child)  # noqa: B023
        time.sleep(moments.uniform(0.0, 0.12))
        nursery.kill(child)


def assert_nothing_acknowledged_is_lost(store: Store, journal: Path, kills: int) -> None:
    commits = read_commits(store)
    acknowledged = {int(seq): int(step) for seq, step in lines_of(journal)}
    assert len(acknowledged) >= kills // 2
    for seq, step in acknowledged.items():
        assert commits[seq]["step"] == step
        assert not commits[seq]["_void"]
    for commit in commits:
        if commit["kind"] != "fence":
            assert commit["digest"] == deltawire.state_digest(state_of(commit["step"], restructure=True)).hex()
    assert verify(store, deep=True).problems == []
    with Subscriber(store, options=ReaderOptions(pin=False)) as subscriber:
        version = subscriber.sync()
        assert version.seq >= max(acknowledged)
        assert version.step is not None
        assert bits_of(subscriber.state) == bits_of(state_of(version.step, restructure=True))


def test_versions_that_killed_publishers_acknowledged_are_in_the_chain(tmp_path: Path) -> None:
    journal = tmp_path / "acknowledged"
    with Nursery(tmp_path / "log") as nursery:
        kill_publishers(nursery, str(tmp_path / "store"), journal, KILLS)
    assert_nothing_acknowledged_is_lost(open_store(tmp_path / "store"), journal, KILLS)


def test_versions_that_killed_publishers_acknowledged_are_in_a_chain_on_s3(tmp_path: Path, seaweedfs: Server) -> None:  # noqa: F811
    journal, url, kills = tmp_path / "acknowledged", seaweedfs.fresh_url(), 14
    with Nursery(tmp_path / "log", seaweedfs.environment) as nursery:
        kill_publishers(nursery, url, journal, kills)
    with mock.patch.dict(os.environ, seaweedfs.environment), open_store(url) as store:
        assert_nothing_acknowledged_is_lost(store, journal, kills)


def served_step(mirror: Path) -> int:
    """Return the step of the version that a mirror serves, after comparing all of its weights with the published ones."""
    with reading_mirror(mirror) as path:
        record: dict[str, Any] = json.loads(json.loads((path / "deltawire.json").read_text())["record"])
        assert bits_of(Checkpoint(path)) == bits_of(state_of(record["step"]))
    return int(record["step"])


def test_a_mirror_whose_subscribers_are_killed_serves_whole_versions_and_fetches_little_again(tmp_path: Path) -> None:
    store, mirror, events, loaded = (tmp_path / name for name in ("store", "mirror", "events", "loaded"))
    moments = random.Random(2)
    served = step = -1
    with Nursery(tmp_path / "log") as nursery, Publisher(store, options=WriterOptions(anchor_policy=AnchorPolicy(8, 16))) as publisher:
        engine = nursery.start("load", mirror, loaded)
        for number in range(KILLS):
            child = nursery.start("mirror", store, mirror, events)
            for _ in range(2):  # only two, so that deltas stay the cheapest route for a reader that is killed too early to keep up
                time.sleep(moments.uniform(0.0, 0.06))
                step += 1
                newest = publisher.publish(state_of(step), step=step)
            if number % 2:
                wait_until(lambda: ["synced", str(newest.seq)] in [line[:2] for line in lines_of(events)], nursery, child)  # noqa: B023
            else:
                time.sleep(moments.uniform(0.0, 0.03))
            nursery.kill(child)
            if served >= 0 or (mirror / "current").exists():
                assert served_step(mirror) >= served  # the mirror never goes back to an older version
                served = served_step(mirror)
        assert served > 0
        with Subscriber(store, mirror) as subscriber:
            assert subscriber.version is not None  # there is a version before any sync
            assert subscriber.version.step == served
            head = subscriber.sync()
            assert head == publisher.version
            assert bits_of(subscriber.state) == bits_of(state_of(step))
        assert served_step(mirror) == step
        wait_until(lambda: ["loaded", str(head.seq)] in lines_of(loaded), nursery, engine)
        nursery.kill(engine)  # it must still be running, because it ends if it loads anything but a whole version
        publisher.publish(state_of(step + 1), step=step + 1)
        with Subscriber(store, mirror) as subscriber:
            subscriber.sync()  # deletes a slot that the engine was loading during the sync before
    assert_little_was_fetched(lines_of(events))
    assert len(list((mirror / "slots").iterdir())) <= 2


def assert_little_was_fetched(events: list[list[str]]) -> None:
    """Check that only the first version was fetched as a checkpoint, perhaps in parts by several processes, and all others as deltas."""
    sizes = [int(size) for name, _, size in events if name == "synced"]
    state_bytes = sum(array.nbytes for array in state_of(0).values())
    assert len(sizes) >= KILLS // 2  # the test waited for every second child
    assert [size for size in sizes[1:] if size > state_bytes // 2] == []
    assert not [event for event in events if event[0] == "resynced"]
