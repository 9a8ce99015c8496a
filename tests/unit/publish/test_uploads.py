"""Uploads run side by side, as many as the store has use for, and only as many bytes as memory allows."""

from __future__ import annotations

import threading

import pytest

from deltawire.format.records.record_parts import FileEntry
from deltawire.publish.upload import data_objects
from deltawire.publish.upload.data_objects import Uploads
from deltawire.publish.upload.upload_pool import UploadPool
from deltawire.store.memory import MemoryStore


class WideStore(MemoryStore):
    streams = 5


class Meeting:
    """Uploads that end only after `expected` of them have run at the same time."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.running = self.most = 0
        self.changed = threading.Condition()

    def upload(self) -> FileEntry:
        with self.changed:
            self.running += 1
            self.most = max(self.most, self.running)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.most >= self.expected, 120)
            self.running -= 1
        return FileEntry("key", 1, 1, "0" * 64)


@pytest.mark.parametrize(("store", "size", "expected"), [(None, 0, 4), (WideStore(), 0, 10), (WideStore(), 100, 3), (WideStore(), 301, 1)])
def test_uploads_run_side_by_side_as_far_as_store_and_memory_allow(monkeypatch, store, size, expected):
    monkeypatch.setattr(data_objects, "_BYTES_IN_FLIGHT", 300)
    meeting = Meeting(expected)
    with UploadPool(32, "test") as pool:
        uploads = Uploads(pool, store)
        for _ in range(24):
            uploads.start(meeting.upload, size=size)
        files, _ = uploads.finish()
    assert len(files) == 24
    assert meeting.most == expected
