"""Relays between real stores, and the command as a process that is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from relayed_chain import assert_data_before_commits, objects_of, open_relay, relay_once
from servers import Server, seaweedfs  # noqa: F401
from support import PACKAGE, bits_of, publisher_arguments
from test_sharded_publisher import publish_all, states

import deltawire
from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.verify import verify
from deltawire.errors import StoreUnavailable
from deltawire.publish import AnchorPolicy, Publisher
from deltawire.relay import data_copy
from deltawire.store import Store, keys
from deltawire.store.copies.sources import Sources
from deltawire.store.local import LocalStore
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore
from deltawire.subscribe import Subscriber

OFTEN = AnchorPolicy(min_versions=4, max_versions=4)


def state_at(step: int, size: int = 4000) -> dict[str, Any]:
    """Return weights of which few change from step to step."""
    weights = np.random.default_rng(0).normal(size=(4, size)).astype(ml_dtypes.bfloat16)
    for each in range(1, step + 1):
        picked = np.random.default_rng(each).choice(4 * size, size=4 * size // 50, replace=False)
        weights.reshape(-1).view(np.uint16)[picked] += 1
    return {f"layer.{number}": row.copy() for number, row in enumerate(weights)}


def publisher_of(store: Store, **given: Any) -> Publisher:
    arguments = {"segment_bytes": 10_000, "anchor_policy": OFTEN, "threads": 1, "attachments": {"config.json": b"{}"}, "run": "run"}
    return Publisher(store, **publisher_arguments(**(arguments | given)))


def bits_in(location: Any, **options: Any) -> Any:
    given = deltawire.ReaderOptions(**({"patience": 0.0, "pin": False, "run": "run"} | options))
    with Subscriber(location, options=given, threads=1) as reader:
        reader.sync()
        return bits_of(reader.state)


@pytest.mark.parametrize("direction", ["from a server", "to a server"])
def test_a_chain_is_relayed_between_a_server_and_a_directory(seaweedfs: Server, tmp_path: Path, direction: str) -> None:  # noqa: F811
    server, folder = seaweedfs.open(), LocalStore(tmp_path / "run")
    origin, region = (server, folder) if direction == "from a server" else (folder, server)
    reading = deltawire.ReaderOptions(run="run", pin=False)
    with (
        publisher_of(origin) as publisher,
        open_relay(origin, region) as relay,
        Subscriber(Sources(origin, [region]), options=reading, threads=1) as reader,
    ):
        for step in range(10):
            publisher.publish(state_at(step), step=step)
            publisher.flush()
            assert relay.copy() == 1 + (step == 0)
            relay.copy_shortcuts()
            assert reader.sync().step == step
            assert bits_of(reader.state) == bits_of(state_at(step))
    assert objects_of(region) == objects_of(origin)
    report = verify(region, deep=True, threads=1)
    assert report.ok, report.problems
    server.close()


def test_a_quantised_and_signed_chain_is_relayed() -> None:
    key = deltawire.SigningKey.generate()
    origin, region = MemoryStore("run"), MemoryStore("run")
    weights = {
        f"model.layers.{n}.mlp.up_proj.weight": np.random.default_rng(n).normal(size=(128, 256)).astype(np.float32) for n in range(2)
    }
    with publisher_of(origin, signing_key=key, quantise="fp8-block") as publisher:
        for step in range(9):
            for each in weights.values():
                each += np.random.default_rng(step).normal(size=each.shape).astype(np.float32) * 1e-2
            publisher.publish(weights, step=step)
            publisher.flush()
            relay_once(origin, region, trusted_keys=[key.public], run="run")
    assert objects_of(region) == objects_of(origin)
    assert bits_in(region, trusted_keys=[key.public]) == bits_in(origin)


@pytest.mark.parametrize(("size", "segment_bytes"), [(1, 4096), (2, 1 << 20), (3, 4096)])
def test_a_chain_of_several_processes_is_relayed_with_its_shortcuts(tmp_path: Path, size: int, segment_bytes: int) -> None:
    versions = states(18)
    origin, region, events = LocalStore(tmp_path / "run"), MemoryStore("run"), []
    publish_all(origin.root, size, versions[:2], anchor_policy=OFTEN, segment_bytes=segment_bytes)
    relay_once(origin, region)
    publish_all(origin.root, size, versions[2:], anchor_policy=OFTEN, segment_bytes=segment_bytes)
    relay_once(origin, region, on_event=events.append)
    made = [event.fields for event in events if event.name == "shortcut-relayed"]
    assert {fields["kind"] for fields in made} == {"anchor", "skip"}
    assert "shortcut-left-out" not in [event.name for event in events]
    assert {*ChainLog(origin).skips(None, 100)} == {*ChainLog(region).skips(None, 100)}
    assert bits_in(region) == bits_of(versions[-1])
    report = verify(region, deep=True, threads=1)
    assert report.ok, report.problems


class CutLink(WrappedStore):
    """A store behind a link that is cut at random bytes of most transfers."""

    def __init__(self, inner: Store, seed: int) -> None:
        super().__init__(inner)
        self._random = random.Random(seed)
        self.cuts = 0

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Any = None) -> None:
        if self._random.random() < 0.6:
            self.cuts += 1
            part = buffer[: self._random.randrange(len(buffer))]
            self.inner.read_into(key, part, offset=offset, progress=progress)
            buffer[len(part) :] = bytes(len(buffer) - len(part))
            raise StoreUnavailable(f"the link was cut after {len(part)} bytes")
        self.inner.read_into(key, buffer, offset=offset, progress=progress)

    def put(self, key: str, data: Any, *, size: int | None = None, progress: Any = None, durable: bool = True) -> None:
        if key.startswith(keys.DATA) and self._random.random() < 0.3:
            raise StoreUnavailable("the link was cut")
        self.inner.put(key, data, size=size, progress=progress, durable=durable)


@pytest.mark.parametrize("seed", range(4))
def test_a_link_that_is_cut_at_random_bytes_delays_a_relay_and_nothing_else(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_copy, "IN_MEMORY", 3000)  # some objects go through files
    origin, region = MemoryStore("run"), MemoryStore("run")
    source, target = CutLink(origin, seed), CutLink(region, seed + 100)
    with publisher_of(origin) as publisher:
        for step in range(12):
            publisher.publish(state_at(step), step=step)
            publisher.flush()
            with open_relay(source, target, spool=tmp_path / "spool") as relay:
                for _ in range(200):
                    try:
                        relay.copy()
                        break
                    except StoreUnavailable:
                        assert_data_before_commits(origin, region)
                relay.copy_shortcuts()
            assert bits_in(region) == bits_of(state_at(step))
    assert source.cuts > 10
    report = verify(region, deep=True, threads=1)
    assert report.ok, report.problems


class Relaying:
    """`deltawire relay` as a process."""

    def __init__(self, origin: Path, region: Path, *more: str) -> None:
        command = [sys.executable, "-m", "deltawire", "relay", str(origin), str(region), "--json", "--poll", "0.01", *more]
        environment = os.environ | {"PYTHONPATH": str(PACKAGE)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def wait_for(self, step: int) -> None:
        """Read lines until the region has the version of a step."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "relayed" and event["step"] >= step:
                return
        raise AssertionError("the relay ended")

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=240)
        return self.process.returncode


def test_a_relay_process_that_is_killed_again_and_again_is_finished_by_the_next(tmp_path: Path) -> None:
    origin, region = LocalStore(tmp_path / "run"), LocalStore(tmp_path / "region" / "run")
    with publisher_of(origin) as publisher:
        step = 0
        for number in range(6):
            relay = Relaying(origin.root, region.root, "--shortcuts", "all" if number % 2 else "none")
            for _ in range(3):
                publisher.publish(state_at(step), step=step)
                step += 1
            relay.wait_for(step - 2)  # while it copies the last one, or after that
            assert relay.end(signal.SIGKILL) == -signal.SIGKILL
            assert_data_before_commits(origin, region)
            assert bits_in(region) in [bits_of(state_at(step - 1)), bits_of(state_at(step - 2))]
        publisher.flush()
        relay = Relaying(origin.root, region.root)
        publisher.publish(state_at(step), step=step)
        relay.wait_for(step)
        assert relay.end(signal.SIGTERM) == 0
    assert bits_in([origin.root, region.root]) == bits_of(state_at(step))
    report = verify(region, deep=True, threads=1)
    assert report.ok, report.problems
