"""A journal gives every answer to the store once after a failure, a kill or a loss of power at any operation on the disk."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import deltawire.gateway.recording.journal as module
from deltawire.gateway.recording.journal import Journal, SealedFile, ended_sessions
from deltawire.gateway.recording.journal_log import JournalDisk

SESSION, NEXT = "g.0123456789abcdef", "g.fedcba9876543210"
_CHANGES = ("write", "truncate", "sync", "rename", "unlink", "sync_folder")


class Ended(BaseException):
    """The process has ended here."""


class EndingDisk(JournalDisk):
    """Ends the process before or after an operation, or in the middle of a write. Nothing that follows does anything."""

    def __init__(self, at: int, *, after: bool) -> None:
        self.count, self._at, self._after = 0, at, after
        self.has_ended = False

    def _step(self, name: str, *arguments: Any) -> Any:
        if self.has_ended:
            raise Ended
        number, self.count = self.count, self.count + 1
        self.has_ended = number == self._at
        if self.has_ended and not self._after:
            if name == "write":
                super().write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise Ended
        result = _done(self, name, *arguments)
        if self.has_ended:
            raise Ended
        return result


class FailingDisk(JournalDisk):
    """Lets one operation fail, and the next `repeats` of the same kind."""

    def __init__(self, at: int, *, repeats: int = 0) -> None:
        self.count, self._at, self._repeats = 0, at, repeats
        self._failing = ""

    def _step(self, name: str, *arguments: Any) -> Any:
        number, self.count = self.count, self.count + 1
        if number == self._at:
            self._failing = name
        if self._failing == name and self._repeats >= 0:
            self._repeats -= 1
            if name == "write":
                super().write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise OSError(5, "an error of the disk")
        return _done(self, name, *arguments)


def _done(disk: JournalDisk, name: str, *arguments: Any) -> Any:
    """Do an operation. The real disk need not be synced, because nothing takes power from it."""
    return None if name in ("sync", "sync_folder") else getattr(JournalDisk, name)(disk, *arguments)


def _stepping(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._step(name, *arguments)


for _name in _CHANGES:
    for _disk in (EndingDisk, FailingDisk):
        setattr(_disk, _name, _stepping(_name))


class File:
    """The contents of a file in the system's memory and on the disk."""

    def __init__(self) -> None:
        self.data = self.synced = b""

    def after_power_loss(self, chance: random.Random, kept: float) -> bytes:
        """Return what is left: what was synced, and perhaps a part of what follows, or zeros in its place."""
        if not self.data.startswith(self.synced):
            return self.data if chance.random() < kept else self.synced
        tail = self.data[len(self.synced) :]
        if chance.random() < kept:
            return self.data
        tail = tail[: int(len(tail) * chance.random() * kept)]
        return self.synced + (tail if chance.random() < 0.5 else bytes(len(tail)))


class PowerLossDisk(EndingDisk):
    """Ends the process at an operation, and knows what a disk may have then that only keeps what was synced."""

    def __init__(self, at: int) -> None:
        super().__init__(at, after=False)
        self._open: dict[int, File] = {}
        self._files: dict[Path, File] = {}
        self._synced: dict[Path, File] = {}
        self._changes: list[tuple[Path, File | None, Path | None]] = []
        """A name, the file that it names from now on, and the name that the file had before."""

    def open(self, path: Path, *, fresh: bool = False) -> int:
        if path not in self._files:
            self._files[path] = File()
            self._changes.append((path, self._files[path], None))
        elif fresh:
            self._files[path].data = b""
        descriptor = super().open(path, fresh=fresh)
        self._open[descriptor] = self._files[path]
        return descriptor

    def write(self, descriptor: int, data: Any) -> int:
        self._step("write", descriptor, data)
        self._open[descriptor].data += bytes(data)
        return len(data)

    def truncate(self, descriptor: int, size: int) -> None:
        self._step("truncate", descriptor, size)
        self._open[descriptor].data = self._open[descriptor].data[:size]

    def sync(self, descriptor: int) -> None:
        self._step("sync", descriptor)
        self._open[descriptor].synced = self._open[descriptor].data

    def rename(self, old: Path, new: Path) -> None:
        self._step("rename", old, new)
        self._files[new] = self._files.pop(old)
        self._changes.append((new, self._files[new], old))

    def unlink(self, path: Path) -> None:
        self._step("unlink", path)
        self._files.pop(path, None)
        self._changes.append((path, None, None))

    def sync_folder(self, folder: Path) -> None:
        self._step("sync_folder", folder)
        for change in [each for each in self._changes if each[0].parent == folder]:
            self._apply(self._synced, change)
            self._changes.remove(change)

    @staticmethod
    def _apply(names: dict[Path, File], change: tuple[Path, File | None, Path | None]) -> None:
        name, file, old = change
        names.pop(name, None)
        if old is not None and names.get(old) is file:
            del names[old]
        if file is not None:
            names[name] = file

    def left(self, folder: Path, new: Path, chance: random.Random, kept: float) -> None:
        """Write what is left into a new directory. Each thing that was not synced is kept with this probability."""
        names = dict(self._synced)
        for change in self._changes:
            if chance.random() < kept:
                self._apply(names, change)
        new.mkdir()
        for name, file in names.items():
            path = new / name.relative_to(folder)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(file.after_power_loss(chance, kept))


class Gateway:
    """Answers, and puts files of answers into a store, as uploads do. A file is the ids of its answers."""

    def __init__(self, folder: Path, disk: JournalDisk | None = None) -> None:
        self.folder, self.disk = folder, disk
        self.acknowledged: list[str] = []
        self.safe: list[str] = []
        """The answers that no loss of power may take."""
        self.stored: dict[tuple[str, int], tuple[str, list[str]]] = {}
        self.journals: list[Journal] = []

    def run(self, session: str, *, begin: int, uploads: bool = True) -> None:
        """Start, recover what sessions before left, and give some answers."""
        self.begin_session(session)
        for name in map(str, range(begin, begin + 8)):
            self.steadily(lambda name=name: self.answer(name))
            if uploads and int(name) % 3 == 2:
                self.steadily(lambda: self.upload(self.journals[0]))
            elif int(name) % 3 == 0:
                self.steadily(self.sync)
        if uploads:
            self.steadily(lambda: self.upload(self.journals[0]))

    @staticmethod
    def steadily(action: Callable[[], None]) -> None:
        """A gateway continues when its disk fails."""
        with contextlib.suppress(OSError):
            action()

    def begin_session(self, session: str) -> None:
        for journal in ended_sessions(self.folder, disk=self.disk):
            self.journals.append(journal)
        self.journals.insert(0, Journal(self.folder, session, disk=self.disk))
        for journal in self.journals[1:]:
            for name in list(journal.open_intents):  # the engine still has what it drew
                journal.add_row(name, row(name))
            self.upload(journal)

    def answer(self, name: str) -> None:
        (journal, *_) = self.journals
        journal.add_intent(name, {"id": name})
        if int(name) % 5 == 4:
            journal.drop_intent(name)
            return
        self.acknowledged.append(name)
        if int(name) % 4:
            journal.add_row(name, row(name))

    def sync(self) -> None:
        written = list(self.acknowledged)
        self.journals[0].sync()
        self.safe += [name for name in written if name not in self.safe]

    def upload(self, journal: Journal) -> None:
        for row_log in journal.sealed_row_logs():
            journal.forget_row_log(row_log)
        for file in journal.files():
            self.put(journal, file)
        journal.rotate()
        for row_log in journal.ended_row_logs():
            number = len({key for key in self.stored if key[0] == journal.session} | {file.number for file in journal.files()})
            files = journal.seal(row_log, self.numbered(journal, row_log, number))
            journal.forget_row_log(row_log)
            for file in files:
                self.put(journal, file)

    @staticmethod
    def numbered(journal: Journal, row_log: int, number: int) -> Iterator[tuple[int, bytes]]:
        for more, part in enumerate(journal.parts(row_log)):
            yield number + more, " ".join(each["interactions"][0]["id"] for each in part).encode()

    def put(self, journal: Journal, file: SealedFile) -> None:
        data = file.read()
        assert data is not None
        key = journal.session, file.number
        kept = self.stored.setdefault(key, (file.blake3, data.decode().split()))
        assert kept[0] == file.blake3, "a number has two files"
        journal.forget_file(file)

    def release(self) -> None:
        """Release what the process held, as its end does."""
        for journal in self.journals:
            journal.close()
        self.journals = []

    def finish(self) -> Counter[str]:
        """Let another process store what is left, and return how often each answer is in the store."""
        self.release()
        self.disk = None
        self.begin_session("g.00000000000000ff")
        assert all(journal.is_empty() for journal in self.journals)
        self.release()
        for session in {session for session, _ in self.stored}:
            numbers = sorted(number for each, number in self.stored if each == session)
            assert numbers == list(range(len(numbers)))
        return Counter(name for _, names in self.stored.values() for name in names)


def row(name: str) -> dict[str, Any]:
    return {"interactions": [{"id": name}]}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row logs and logs of intents are small, so that everything happens soon."""
    monkeypatch.setattr(module, "MOST_ROWS", 2)
    monkeypatch.setattr(module, "_COMPACT_BYTES", 100)


def workload(gateway: Gateway) -> None:
    """Two sessions. The second finds a journal from before row logs were bounded."""
    module.MOST_ROWS = 100
    gateway.run(SESSION, begin=0, uploads=False)
    gateway.release()
    module.MOST_ROWS = 2
    gateway.run(NEXT, begin=8)


def count(tmp_path: Path) -> int:
    disk = FailingDisk(-1)
    gateway = Gateway(tmp_path / "counted", disk)
    gateway.folder.mkdir()
    workload(gateway)
    gateway.finish()
    assert disk.count > 100
    return disk.count


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_gateway_that_ends_at_any_operation_on_its_journal_loses_and_repeats_nothing(after: bool, tmp_path: Path) -> None:
    for at in range(count(tmp_path)):
        gateway = Gateway(tmp_path / f"{at}", EndingDisk(at, after=after))
        gateway.folder.mkdir()
        with pytest.raises(Ended):
            workload(gateway)
        counts = gateway.finish()
        assert set(gateway.acknowledged) <= counts.keys(), at
        assert set(counts.values()) <= {1}, at


@pytest.mark.parametrize("repeats", [0, 1, 2])
def test_a_journal_whose_disk_fails_at_any_operation_loses_and_repeats_nothing(repeats: int, tmp_path: Path) -> None:
    """A truncation that fails after a write is the case with `repeats`: its row must not hide those after it."""
    for at in range(count(tmp_path)):
        gateway = Gateway(tmp_path / f"{at}", FailingDisk(at, repeats=repeats))
        gateway.folder.mkdir()
        try:
            workload(gateway)
        except OSError:
            gateway.release()
        counts = gateway.finish()
        assert set(gateway.acknowledged) <= counts.keys(), at
        assert set(counts.values()) <= {1}, at


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.7, 1.0])
def test_a_loss_of_power_at_any_operation_takes_only_what_was_not_synced_and_repeats_nothing(
    kept: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kept in (0.0, 0.3):  # a compaction also syncs names
        monkeypatch.setattr(module, "_COMPACT_BYTES", 1 << 20)
    for at in range(count(tmp_path)):
        before = tmp_path / f"{at}"
        disk = PowerLossDisk(at)
        gateway = Gateway(before, disk)
        before.mkdir()
        with pytest.raises(Ended):
            workload(gateway)
        gateway.release()
        gateway.folder = tmp_path / f"{at} after"
        disk.left(before, gateway.folder, random.Random(f"{at} {kept}"), kept)
        counts = gateway.finish()
        assert set(gateway.safe) <= counts.keys(), at
        assert set(counts.values()) <= {1}, at
