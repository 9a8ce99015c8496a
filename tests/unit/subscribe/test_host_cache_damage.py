"""Damaged files, foreign directories and a full disk cost readers of a host cache one more fetch, and nothing else."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shared_host import Host

from deltawire.chain import fetch


def flip_a_bit(path: Path, precious: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(path: Path, precious: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def make_longer(path: Path, precious: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def replace_by_link(path: Path, precious: Path) -> None:
    path.unlink()
    path.symlink_to(precious)


def replace_by_second_name(path: Path, precious: Path) -> None:
    path.unlink()
    path.hardlink_to(precious)


def replace_by_pipe(path: Path, precious: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_socket(path: Path, precious: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as bound:
        folder = os.getcwd()
        os.chdir(path.parent)  # the whole path would be too long
        try:
            bound.bind(path.name)
        finally:
            os.chdir(folder)


def give_away(path: Path, precious: Path) -> None:
    if os.getuid() == 0:
        os.chown(path, 65534, -1)
    else:  # only root can give files away
        path.unlink()


DAMAGES = [give_away, flip_a_bit, cut_short, make_longer, replace_by_link, replace_by_second_name, replace_by_pipe, replace_by_socket]


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A file that is not of the cache, and must not change."""
    path = tmp_path / "precious"
    path.write_bytes(b"not of the cache")
    yield path
    assert path.read_bytes() == b"not of the cache"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_with_wrong_content_costs_one_fetch_and_nothing_else(
    host: Host, precious: Path, damage: Callable[[Path, Path], None]
) -> None:
    everything = host.sync()
    for path in host.files():
        damage(path, precious)
    assert host.sync() == everything
    assert host.sync() == 0
    assert not host.reasons()


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unfinished_file_that_holds_something_else_is_never_used(
    host: Host, precious: Path, damage: Callable[[Path, Path], None]
) -> None:
    everything = host.sync()
    for path in host.files():
        damage(path, precious)
        path.rename(f"{path}.part0")
    assert host.sync() <= 2 * everything  # the end of a file of almost the right size is fetched before it proves to be wrong
    assert host.sync() == 0
    assert not host.reasons()


def test_a_directory_with_the_name_of_a_file_only_keeps_this_file_from_being_shared(host: Host) -> None:
    everything = host.sync()
    path = host.files()[0]
    size = path.stat().st_size
    path.unlink()
    path.mkdir()
    assert host.sync() == size
    assert host.sync() == size
    assert len(host.reasons()) == 2
    assert everything > size


def test_a_directory_that_other_users_can_write_to_is_not_used(host: Host) -> None:
    host.folder.mkdir()
    host.folder.chmod(0o770)
    everything = host.sync()
    assert everything == host.sync()
    assert host.files() == []
    assert len(host.reasons()) == 2
    assert all("only this user can write to" in str(reason) for reason in host.reasons())


def test_the_directory_of_another_user_is_not_used(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = host.sync()
    user = os.getuid() + 1
    if os.getuid() == 0:
        os.chown(host.folder, user, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: user)
    assert host.sync() == everything
    assert len(host.reasons()) == 1


def test_a_link_to_a_directory_is_not_used(host: Host, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    host.folder.symlink_to(tmp_path / "elsewhere")
    assert host.sync() == host.sync() > 0
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_disk_that_is_full_stops_no_reader(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    full: list[int] = []

    def fail(descriptor: int, data: bytes) -> int:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(host.folder)):
            full.append(descriptor)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(fetch.os, "write", fail)
        host.sync()
    assert full
    assert host.files() == []
    assert any("No space left" in str(reason) for reason in host.reasons())
    assert host.sync() > 0
    assert host.sync() == 0
