"""Announcements follow the uploads, are bounded, and are never waited for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from announced_files import Inline

from deltawire import Digest
from deltawire.errors import StoreUnavailable
from deltawire.format.records.announcement_records import Announcement
from deltawire.format.records.canonical import MAX_RECORD_BYTES
from deltawire.format.records.file_list import MOST_IN_RECORD
from deltawire.format.records.record_parts import CommitRef, FileEntry
from deltawire.format.records.signing import SigningKey, check_signature
from deltawire.publish.upload import announcer
from deltawire.publish.upload.announcer import Announcer
from deltawire.publish.upload.upload_pool import UploadPool
from deltawire.store import keys
from deltawire.store.memory import MemoryStore

ID, BASE, SEQ = "ab" * 16, CommitRef(2**62, "cd" * 32, Digest()), 2**62 + 5


def entry(number: int) -> FileEntry:
    content = f"{number:064x}"
    return FileEntry(keys.data_key(3, SEQ, content, "safetensors"), 2**40, 2**50, content, None, 10**6 * number, 10**6)


def announced(store: MemoryStore) -> Announcement:
    return Announcement.parse(store.get(keys.COMING, limit=MAX_RECORD_BYTES))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "INTERVAL", 0.0)


def test_each_announcement_has_all_files_so_far_in_order_and_a_higher_number() -> None:
    store = MemoryStore()
    key = SigningKey.generate()
    writer = Announcer(store, Inline(), ID, 3, key)
    writer.begin(BASE, SEQ)
    for count, number in enumerate((4, 0, 2), 1):
        writer.add(entry(number))
        found = announced(store)
        check_signature(found, [key.public])
        assert (found.id, found.epoch, found.seq, found.base, found.number) == (ID, 3, SEQ, BASE, count - 1)
    assert [each.first for each in found.files] == [0, 2 * 10**6, 4 * 10**6]
    writer.end()
    writer.add(entry(5))
    assert announced(store) == found
    writer.begin(BASE, SEQ)
    writer.add(entry(6))
    assert (announced(store).files, announced(store).number) == ((entry(6),), 3)


def test_an_announcement_fits_into_a_record_however_many_files_there_are() -> None:
    store = MemoryStore()
    writer = Announcer(store, Inline(), ID, 3, SigningKey.generate())
    writer.begin(BASE, SEQ)
    for number in range(MOST_IN_RECORD + 20):
        writer.add(entry(number))
    assert announced(store).files == tuple(map(entry, range(MOST_IN_RECORD)))


def test_nothing_waits_for_an_announcement_and_one_at_a_time_is_in_flight() -> None:
    """The store does not answer the first put until everything was added. Files that were added meanwhile go into the next one."""
    answer, arrived = threading.Event(), threading.Event()
    files: list[int] = []

    class Slow(MemoryStore):
        def put(self, key: str, data: Any, **more: Any) -> None:
            files.append(len(Announcement.parse(bytes(data)).files))
            arrived.set()
            assert answer.wait(60)
            super().put(key, data, **more)

    store = Slow()
    with UploadPool(4, "test") as pool:
        writer = Announcer(store, pool, ID, 3)
        writer.begin(BASE, SEQ)
        writer.add(entry(0))
        assert arrived.wait(60)
        for number in range(1, 10):
            writer.add(entry(number))
        assert files == [1]
        answer.set()
    assert files == [1, 10]


def test_a_store_that_fails_only_delays_the_announcement() -> None:
    failures = [True, True, False]

    class Failing(MemoryStore):
        def put(self, key: str, data: Any, **more: Any) -> None:
            if failures.pop(0):
                raise StoreUnavailable("no answer.")
            super().put(key, data, **more)

    store = Failing()
    writer = Announcer(store, Inline(), ID, 3)
    writer.begin(BASE, SEQ)
    for number in range(3):
        writer.add(entry(number))
    assert len(announced(store).files) == 3


def test_a_version_that_is_made_quickly_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "INTERVAL", 3600.0)
    store = MemoryStore()
    with UploadPool(4, "test") as pool:
        writer = Announcer(store, pool, ID, 3)
        writer.begin(BASE, SEQ)
        writer.add(entry(0))
        writer.end()
    assert not list(store.list(""))


def test_a_pool_that_was_shut_down_announces_nothing() -> None:
    pool = UploadPool(1, "test")
    pool.shutdown()
    store = MemoryStore()
    writer = Announcer(store, pool, ID, 3)
    writer.begin(BASE, SEQ)
    writer.add(entry(0))
    assert not list(store.list(""))
