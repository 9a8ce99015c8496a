"""Readers of the local store never see an object that is half written, even if its writer is killed."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from deltawire.errors import (
    DataDamaged,
    ObjectExists,
    ObjectMissing,
    OutcomeUnknown,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
)
from deltawire.store.local import LocalStore

WRITER = """
import sys
from deltawire.store.local import LocalStore
store, number = LocalStore(sys.argv[1]), 0
print("ready", flush=True)
while True:
    number += 1
    byte = bytes([number % 256])
    store.put("HEAD", [byte * 300_000] * 10)
    store.put(f"data/{number:06}/object", byte * 3_000_000)
    store.put_if_absent(f"commit/{number:06}", byte * 60_000)
    store.delete([f"data/{number - 3:06}/object", f"commit/{number - 3:06}"])
"""
SIZES = {"HEAD": 3_000_000, "data": 3_000_000, "commit": 60_000}


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the paths that are flushed from now on."""
    paths: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: paths.append(os.readlink(f"/proc/self/fd/{file}")))
    return paths


def _temporaries(root: Path) -> list[Path]:
    return list((root / ".deltawire-tmp").iterdir())


def test_a_killed_writer_leaves_whole_objects_only(tmp_path: Path) -> None:
    for turn in range(6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(0.03 + 0.017 * turn)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            if writer.stdout is not None:
                writer.stdout.close()
        store = LocalStore(tmp_path)
        for info in store.list(""):
            content = store.get(info.key, limit=SIZES[info.key.split("/")[0]])
            assert len(content) == info.size == SIZES[info.key.split("/")[0]]
            assert content == content[:1] * len(content)
        store.delete([info.key for info in store.list("")])
        store.put("cleans", b"up")
        assert _temporaries(tmp_path) == []
        store.delete(["cleans"])
        # A writer that is killed after it has made a folder may leave the empty folder, and nothing else.
        assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_temporaries_of_the_dead_are_removed_and_those_of_the_living_kept(tmp_path: Path) -> None:
    first = LocalStore(tmp_path)
    seen: list[int] = []

    def pieces() -> list[bytes]:
        (tmp_path / ".deltawire-tmp" / "left-by-a-dead-writer").write_bytes(b"half an obj")
        LocalStore(tmp_path).put("other", b"written meanwhile, after cleaning up")
        seen.append(len(_temporaries(tmp_path)))
        return [b"who", b"le"]

    first.put("object", (piece for turn in (pieces,) for piece in turn()))
    assert seen == [1]
    assert first.get("object", limit=10) == b"whole"
    assert _temporaries(tmp_path) == []


def test_temporaries_are_neither_listed_nor_reachable(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("object", b"x")
    (tmp_path / ".deltawire-tmp" / "something").write_bytes(b"x")
    (tmp_path / "not a key").write_bytes(b"x")
    assert [info.key for info in store.list("")] == ["object"]
    with pytest.raises(StoreError):
        store.get(".deltawire-tmp/something", limit=10)


def test_everything_is_flushed_before_a_write_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []

    def named(file: int) -> str:
        return os.readlink(f"/proc/self/fd/{file}")

    real_fsync, real_link, real_replace = os.fsync, os.link, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (events.append(("fsync", named(file))), real_fsync(file))[1])
    monkeypatch.setattr(os, "link", lambda a, b: (events.append(("name", str(a))), real_link(a, b))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(("name", str(a))), real_replace(a, b))[1])
    store = LocalStore(tmp_path)
    store.put("warm", b"up")
    for key, write in (("a/b/created", store.put_if_absent), ("c/d/put", store.put)):
        events.clear()
        write(key, b"x")
        temporary = next(path for kind, path in reversed(events) if kind == "name")
        named_at = max(index for index, event in enumerate(events) if event == ("name", temporary))
        assert ("fsync", temporary) in events[:named_at]
        for folder in (key.rsplit("/", 1)[0], key.split("/")[0], "."):
            assert ("fsync", str((tmp_path / folder).resolve())) in events[named_at:]


def test_a_folder_is_flushed_with_every_name_in_it_and_its_own_name_once(tmp_path: Path, flushed: list[str]) -> None:
    store = LocalStore(tmp_path)
    store.put("warm", b"up")
    folders = {
        "data/1/7": str(tmp_path / "data/1/7"),
        "data/1": str(tmp_path / "data/1"),
        "data": str(tmp_path / "data"),
        "": str(tmp_path),
    }

    def flushes_of(write: Callable[[], None]) -> list[str]:
        flushed.clear()
        write()
        return [name for name, path in folders.items() if path in flushed]

    assert flushes_of(lambda: store.put("data/1/7/a", b"x")) == ["data/1/7", "data/1", "data", ""]
    assert flushes_of(lambda: store.put("data/1/7/b", b"x")) == ["data/1/7"]
    assert flushes_of(lambda: store.put_if_absent("data/1/8", b"x")) == ["data/1"]
    store.delete(["data/1/7/a", "data/1/7/b"])  # this also removes the folder, which is now empty
    assert flushes_of(lambda: store.put("data/1/7/a", b"x")) == ["data/1/7", "data/1"]
    LocalStore(tmp_path).delete(["data/1/7/a"])  # another process does the same
    assert flushes_of(lambda: store.put("data/1/7/a", b"x")) == ["data/1/7", "data/1"]
    assert flushes_of(lambda: LocalStore(tmp_path).put("data/1/7/b", b"x")) == ["data/1/7", "data/1", "data", ""]


def test_a_hint_waits_for_no_disk(tmp_path: Path, flushed: list[str]) -> None:
    store = LocalStore(tmp_path)
    store.put("warm", b"up")
    flushed.clear()
    store.put("pin/me", b"x", durable=False)
    assert flushed == []
    assert store.get("pin/me", limit=1) == b"x"


def test_an_existing_object_counts_only_after_it_was_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first attempt has named the object, and then the disk failed. The object exists, but may be lost in a power failure."""
    store = LocalStore(tmp_path)
    store.put("warm", b"up")

    def fail(_: Path) -> None:
        raise OSError(errno.EIO, "the disk was removed")

    with monkeypatch.context() as patched:
        patched.setattr("deltawire.store.local.sync_folder", fail)
        for _ in range(2):
            with pytest.raises(OutcomeUnknown):
                store.put_if_absent("created", b"x")
        with pytest.raises(StoreUnavailable):
            store.get("created", limit=1)
        assert LocalStore(tmp_path).get("created", limit=1) == b"x"  # a process that only reads need not flush
    with pytest.raises(ObjectExists):
        store.put_if_absent("created", b"x")
    assert store.get("created", limit=1) == b"x"


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EACCES, StoreDenied),
        (errno.EROFS, StoreDenied),
        (errno.EIO, StoreUnavailable),
        (errno.EINVAL, StoreError),
    ],
)
def test_errors_of_the_file_system_are_translated_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[StoreError]
) -> None:
    store = LocalStore(tmp_path)
    store.put("object", b"old")

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fail)
        for write in (lambda: store.put("object", b"new"), lambda: store.put_if_absent("created", b"new")):
            with pytest.raises(expected) as raised:
                write()
            assert type(raised.value) is expected
    assert store.get("object", limit=10) == b"old"
    with pytest.raises(ObjectMissing):
        store.head("created")
    assert _temporaries(tmp_path) == []


def test_a_creation_that_may_not_survive_a_crash_is_of_unknown_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("warm", b"up")

    def fail(_: Path) -> None:
        raise OSError(errno.EIO, "the disk was removed")

    monkeypatch.setattr("deltawire.store.local.sync_folder", fail)
    with pytest.raises(OutcomeUnknown):
        store.put_if_absent("created", b"x")
    with pytest.raises(StoreUnavailable):
        store.put("put", b"x")


def test_a_file_system_without_links_is_unsuitable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(StoreUnsuitable, match="hard links"):
        LocalStore(tmp_path).put_if_absent("created", b"x")


def test_a_name_is_an_object_or_a_folder_and_not_both(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"x")
    with pytest.raises(StoreError):
        store.put("a/b", b"x")
    store.put("folder/object", b"x")
    with pytest.raises(StoreError):
        store.put("folder", b"x")
    assert [info.key for info in store.list("")] == ["a", "folder/object"]


def test_a_folder_sorts_by_its_slash(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    keys = ["b-c", "b.c", "b/c", "b/d", "b0"]
    for key in keys:
        store.put(key, b"")
    assert [info.key for info in store.list("")] == keys
    assert [info.key for info in store.list("", after="b.c")] == keys[2:]
    assert [info.key for info in store.list("", after="b/c")] == keys[3:]


def test_reading_creates_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "absent")
    assert list(store.list("")) == []
    store.delete(["nothing"])
    with pytest.raises(ObjectMissing):
        store.get("nothing", limit=1)
    assert not (tmp_path / "absent").exists()


def _put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)  # the path of a socket must be short
        made.bind(path.name)


@pytest.mark.parametrize("make", [os.mkfifo, _put_socket])
def test_an_object_that_is_no_regular_file_is_refused_by_name_and_does_not_block(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore(tmp_path)
    store.put("data/a", b"a")
    make(tmp_path / "data" / "b")
    for read in (
        lambda: store.get("data/b", limit=9),
        lambda: store.head("data/b"),
        lambda: store.read_into("data/b", memoryview(bytearray(1))),
    ):
        with pytest.raises(DataDamaged, match="not a file"):
            read()
    assert [info.key for info in store.list("data/")] == ["data/a"]
    with pytest.raises(ObjectExists):
        store.put_if_absent("data/b", b"b")
    store.put("data/b", b"b")
    assert store.get("data/b", limit=9) == b"b"


@pytest.fixture
def deep_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make 1,500 nested folders. Their path is longer than the system allows, and too deep for Python to delete."""
    monkeypatch.chdir(tmp_path)
    try:
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        yield tmp_path
    finally:
        subprocess.run(["rm", "-r", tmp_path / "d"], check=True)


def test_folders_too_deep_for_a_key_are_passed_over(deep_folder: Path) -> None:
    store = LocalStore(deep_folder)
    deep = "d/" * 250 + "file"
    for key in (deep, "z"):
        store.put(key, b"")
    assert [info.key for info in store.list("")] == [deep, "z"]


def test_links_that_lead_in_a_circle_are_followed_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("data/a", b"a")
    for name in ("b", "c", "d"):
        (tmp_path / "store" / "data" / name).symlink_to(".")
    (tmp_path / "store" / "data" / "e").symlink_to("e")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "f").write_bytes(b"f")
    (tmp_path / "store" / "other").symlink_to(elsewhere)
    assert [info.key for info in store.list("other/")] == ["other/f"]
    assert [info.key for info in store.list("data/")] == ["data/a", "data/b/a", "data/c/a", "data/d/a"]


@pytest.mark.parametrize("seconds", [-(2.0**62), -1.0, 0.0, 2.0**36, 2.0**62])
def test_times_that_no_calendar_has_are_times_all_the_same(seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems store such times; `touch --date=@-99999999999` makes one. The test replaces the answers of `stat`."""
    store = LocalStore(tmp_path)
    store.put("a", b"")
    facts = os.stat(tmp_path / "a")
    odd = os.stat_result((*facts[:7], seconds, seconds, seconds))
    monkeypatch.setattr(os, "stat", lambda path, **_: odd)
    for info in (store.head("a"), *store.list("")):
        assert info.modified - timedelta(days=365) < info.modified < info.modified + timedelta(days=365 * 1000)
