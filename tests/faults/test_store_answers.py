"""How publishers and readers handle error answers of a store: 409, 412, 429, 503, time-outs, and no space left."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from publications import (
    SESSION,
    Ledger,
    Listener,
    assert_goes_on,
    assert_one_history,
    bits_at,
    open_publisher,
    open_subscriber,
    published,
    run_session,
    state_at,
    visible_step,
)
from support import bits_of

from deltawire.errors import CommitOutcomeUnknown, MirrorError, ObjectExists, OutcomeUnknown, StoreFull, StoreUnavailable
from deltawire.format.records.canonical import dump
from deltawire.publish import AnchorPolicy
from deltawire.store import local
from deltawire.store.local import LocalStore
from deltawire.store.memory import MemoryStore
from deltawire.testing import After, Before, Call, FaultyStore, call


class AnsweredTwice(FaultyStore):
    """A store in which every request to create an object arrives twice. The caller gets the answer to the second one."""

    def put_if_absent(self, key: str, data: bytes) -> None:
        with contextlib.suppress(ObjectExists):
            super().put_if_absent(key, data)
        raise ObjectExists(f"412 for {key}.")


class Conflicting(FaultyStore):
    """A store that first answers 409 to every creation, and performs every other one.

    The caller cannot tell whether its object was created.
    """

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self._answered: set[bytes] = set()

    def put_if_absent(self, key: str, data: bytes) -> None:
        if key.startswith("probe/") or data in self._answered:
            super().put_if_absent(key, data)
            return
        self._answered.add(data)
        if len(self._answered) % 2:
            super().put_if_absent(key, data)
        raise OutcomeUnknown(f"409 for {key}.")


class Outage:
    """A condition for faults. Once it is `due`, it holds from the first call with such a key on."""

    def __init__(self, first: str = "") -> None:
        self._first = first
        self._on = False
        self.due = False

    def __call__(self, call: Call) -> bool:
        self._on = self._on or (self.due and call.key.startswith(self._first))
        return self._on

    def end(self) -> None:
        self.due = self._on = False


def test_a_412_for_ones_own_object_is_a_success() -> None:
    inner, ledger = MemoryStore(), Ledger()
    run_session(AnsweredTwice(inner), ledger)
    assert len(ledger.acknowledged) == SESSION
    assert_goes_on(inner, ledger)


class Misread(FaultyStore):
    """A store that creates every commit without an answer.

    The first time the commit is read back, one digit of its nonce or epoch is wrong.
    """

    def __init__(self, field: str) -> None:
        super().__init__(MemoryStore(), [After(call("put_if_absent", "commit/"), "unknown", times=None)])
        self._field = field
        self._read: set[str] = set()

    def get(self, key: str, *, limit: int) -> bytes:
        data = super().get(key, limit=limit)
        if not key.startswith("commit/") or key in self._read:
            return data
        self._read.add(key)
        record = json.loads(data)
        record[self._field] = {"nonce": "0" * 32, "epoch": 17}[self._field]
        return dump(record)


@pytest.mark.parametrize("field", ["nonce", "epoch"])
def test_a_publisher_looks_twice_before_it_halts_for_good(field: str) -> None:
    store, ledger = Misread(field), Ledger()
    with open_publisher(store) as publisher:
        ledger.publish(publisher, 3)
    assert_one_history(store.inner, ledger)


def test_a_409_is_looked_into() -> None:
    store, ledger = Conflicting(), Ledger()
    run_session(store, ledger, tries=3)
    assert len(ledger.acknowledged) == SESSION
    assert_goes_on(store.inner, ledger)


@pytest.mark.parametrize("first", ["data/", "commit/"])
def test_throttling_and_server_errors_fail_a_publication_which_can_be_repeated(first: str) -> None:
    """429, 503 and time-outs last longer than the store's own retries. The outage begins at one kind of object."""
    inner, ledger, events = MemoryStore(), Ledger(), Listener()
    outage = Outage(first)
    with open_publisher(FaultyStore(inner, [Before(outage, "unavailable", times=None)]), on_event=events) as publisher:
        ledger.publish(publisher, 2)
        outage.due = True
        for _ in range(3):
            with pytest.raises((StoreUnavailable, CommitOutcomeUnknown)) as caught:
                ledger.publish(publisher)
            assert caught.value.retryable
        assert visible_step(inner) == 1
        outage.end()
        ledger.publish(publisher, 2)
    assert events.names().count("publish-failed") == 3
    assert visible_step(inner) == ledger.newest
    assert_one_history(inner, ledger)


def test_a_reader_sits_out_an_outage() -> None:
    outage = Outage()
    inner, ledger = published(2)
    store = FaultyStore(inner, [Before(outage, "unavailable", times=None)])
    events = Listener()
    with open_subscriber(store, on_event=events) as reader:
        reader.sync()
        with open_publisher(inner) as publisher:
            ledger.publish(publisher)
        outage.due = True
        for _ in range(3):
            with pytest.raises(StoreUnavailable) as caught:
                reader.sync()
            assert caught.value.retryable
            assert bits_of(reader.state) == bits_at(1)
        outage.end()
        assert reader.sync().step == ledger.newest
    assert events.names().count("sync-failed") == 3


class FullDisk:
    """Replace `os.write` so that its n-th call finds no space left. If the disk stays full, all later calls fail too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes = 0
        self.full_at: int | None = None
        self.stays_full = False
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, data: bytes) -> int:
        self.writes += 1
        if self.full_at is not None and (self.writes == self.full_at or (self.stays_full and self.writes > self.full_at)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(file, data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FullDisk]:
    disk = FullDisk(monkeypatch)
    yield disk
    disk.full_at = None


def test_a_disk_that_is_full_at_any_write_of_a_local_store_loses_nothing(tmp_path: Path, disk: FullDisk) -> None:
    run_session(LocalStore(tmp_path / "count"), Ledger())
    writes = disk.writes
    assert writes > 25
    for number in range(1, writes + 1):
        store, ledger = LocalStore(tmp_path / str(number)), Ledger()
        disk.writes, disk.full_at = 0, number
        run_session(store, ledger, tries=2)
        disk.full_at = None
        assert len(ledger.acknowledged) == SESSION
        assert visible_step(store) == ledger.newest
        assert_one_history(store, ledger)


def test_a_disk_that_stays_full_is_an_error_that_says_so(tmp_path: Path, disk: FullDisk) -> None:
    store, ledger = LocalStore(tmp_path / "store"), Ledger()
    with open_publisher(store) as publisher:
        ledger.publish(publisher, 2)
        disk.stays_full, disk.full_at = True, disk.writes + 1
        for _ in range(2):
            with pytest.raises(StoreFull) as caught:
                publisher.publish(state_at(ledger.next_step))
            assert caught.value.retryable
        disk.full_at = None
        ledger.publish(publisher)
    assert visible_step(store) == ledger.newest
    assert not any((tmp_path / "store" / ".deltawire-tmp").iterdir())


def test_a_commit_whose_name_could_not_be_flushed_is_not_acknowledged_before_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same process can read the commit back, but the commit might not survive a power failure."""
    store, ledger = LocalStore(tmp_path / "store"), Ledger()
    with open_publisher(store) as publisher:
        ledger.publish(publisher, 2)
        with monkeypatch.context() as patched:
            flush = local.sync_folder

            def fail(folder: Path) -> None:
                if folder.name == "commit":
                    raise OSError(errno.EIO, "the disk does not answer")
                flush(folder)

            patched.setattr(local, "sync_folder", fail)
            for _ in range(2):
                with pytest.raises(CommitOutcomeUnknown):
                    publisher.publish(state_at(2), step=2)
        ledger.tried.append(2)
        ledger.publish(publisher)
    assert visible_step(store) == 3
    assert_one_history(store, ledger)


def test_a_store_that_is_full_takes_no_commit_and_readers_keep_their_version() -> None:
    inner, ledger = MemoryStore(), Ledger()
    store = FaultyStore(inner, [Before(call("put_if_absent", "commit/00000000000000000003"), "full")])
    with open_publisher(store) as publisher:
        ledger.publish(publisher, 2)
        with pytest.raises(StoreFull):
            publisher.publish(state_at(ledger.next_step))
        assert visible_step(inner) == ledger.newest
        ledger.publish(publisher)
    assert_one_history(inner, ledger)


def test_a_mirror_on_a_full_disk_keeps_serving_and_continues_when_there_is_room(tmp_path: Path, disk: FullDisk) -> None:
    store, ledger = published(2)
    with open_subscriber(store, tmp_path / "mirror") as reader:
        reader.sync()
        with open_publisher(store, anchor_policy=AnchorPolicy()) as publisher:
            ledger.publish(publisher)
            # the new tensor makes this version a full checkpoint
            publisher.publish({**state_at(ledger.next_step), "new": state_at(ledger.next_step)["c.bias"]}, step=99)
        disk.stays_full, disk.full_at = True, disk.writes + 1
        with pytest.raises(MirrorError) as caught:
            reader.sync()
        assert caught.value.retryable
        assert bits_of(reader.state) == bits_at(1)
        disk.full_at = None
        assert reader.sync().step == 99
