"""A file that was fetched in part is continued, and only its right bytes are used."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fetch import put

from deltawire.chain import fetch
from deltawire.chain.fetch import Fetcher
from deltawire.errors import DataDamaged, StoreUnavailable
from deltawire.store.memory import MemoryStore

DATA = random.Random(5).randbytes(10_007)
WINDOW = 1000


class CuttingStore(MemoryStore):
    """Fails before reads that pass the byte `cut`, once, and counts the bytes that were read."""

    def __init__(self):
        super().__init__()
        self.cuts: list[tuple[int, type[BaseException]]] = []
        self.read = 0
        self.doubted = []

    def read_into(self, key, buffer, *, offset=0, progress=None):
        if self.cuts and offset + len(buffer) > self.cuts[0][0]:
            raise self.cuts.pop(0)[1]("cut")
        super().read_into(key, buffer, offset=offset, progress=progress)
        self.read += len(buffer)

    def doubt(self, key):
        self.doubted.append(key)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch):
    monkeypatch.setattr(fetch, "_WINDOW", WINDOW)


@pytest.fixture
def store():
    return CuttingStore()


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.sampled_from([StoreUnavailable])), max_size=8))
def test_what_came_before_a_cut_is_not_fetched_again(tmp_path_factory, cuts):
    store = CuttingStore()
    entry = put(store, DATA)
    store.cuts = sorted(cuts)
    path = tmp_path_factory.mktemp("cut") / "file.part"
    for _ in range(len(cuts) + 1):
        try:
            Fetcher(store).fetch_to_file(entry, path, resume=True)
            break
        except StoreUnavailable:
            assert DATA.startswith(path.read_bytes())
    assert path.read_bytes() == DATA
    assert store.read <= len(DATA) + len(cuts) * WINDOW  # at most the window that was read ahead
    assert store.doubted == []


def test_without_resume_nothing_is_left(store, tmp_path):
    entry = put(store, DATA)
    store.cuts = [(5000, StoreUnavailable)]
    with pytest.raises(StoreUnavailable):
        Fetcher(store).fetch_to_file(entry, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_other_errors_leave_nothing(store, tmp_path):
    entry = put(store, DATA)
    store.put(entry.key, DATA[:-1] + b"?")
    with pytest.raises(DataDamaged):
        Fetcher(store).fetch_to_file(entry, tmp_path / "file", resume=True)
    assert list(tmp_path.iterdir()) == []
    assert store.doubted == [entry.key]


@pytest.mark.parametrize("size", [0, 1, WINDOW, 4321, len(DATA)])
def test_the_file_of_a_process_that_was_killed_is_continued(store, tmp_path, size):
    (tmp_path / "file").write_bytes(DATA[:size])
    moved: list[int] = []
    Fetcher(store).fetch_to_file(put(store, DATA), tmp_path / "file", resume=True, progress=moved.append)
    assert (tmp_path / "file").read_bytes() == DATA
    assert sum(moved) == store.read == len(DATA) - size


@pytest.mark.parametrize("size", [1, 4321, len(DATA), len(DATA) + 1, 2 * len(DATA)])
def test_a_file_with_other_content_is_fetched_from_the_beginning(store, tmp_path, size):
    (tmp_path / "file").write_bytes((b"?" + 2 * DATA)[:size])
    Fetcher(store).fetch_to_file(put(store, DATA), tmp_path / "file", resume=True)
    assert (tmp_path / "file").read_bytes() == DATA
    assert store.read <= 2 * len(DATA)
    assert store.doubted == []  # the store is not to blame


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_file_with_another_name_is_not_changed(store, tmp_path, link):
    (tmp_path / "precious").write_bytes(DATA[:100])
    link(tmp_path / "precious", tmp_path / "file")
    Fetcher(store).fetch_to_file(put(store, DATA), tmp_path / "file", resume=True)
    assert (tmp_path / "file").read_bytes() == DATA
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "precious").read_bytes() == DATA[:100]


def test_a_pipe_in_the_way_is_replaced(store, tmp_path):
    os.mkfifo(tmp_path / "file")
    Fetcher(store).fetch_to_file(put(store, DATA), tmp_path / "file", resume=True)
    assert (tmp_path / "file").read_bytes() == DATA
