"""Test the spool: what a worker finds there is complete and unchanged, or it is fetched again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from spooled_chain import context_of, directory_chain, grown_chain, hop_of
from support import PACKAGE, bits_of, copied
from toy_chain import ToyChain, first_state

import deltawire
from deltawire.errors import DataDamaged, SpoolError, UnsupportedVersion
from deltawire.format.records.canonical import dump
from deltawire.store.local import LocalStore
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore
from deltawire.subscribe.mirror.locks import FileLock
from deltawire.subscribe.spool import delta_spool
from deltawire.subscribe.spool.delta_spool import DeltaSpool, default_spool
from deltawire.subscribe.spool.spooled_hop import SpooledHop


def put(spool: DeltaSpool, chain: ToyChain, seq: int) -> tuple[SpooledHop, int]:
    """Put the hop to a version into the spool. Return it, and the bytes that were fetched."""
    context = context_of(chain.store)
    hop = spool.put(hop_of(context, chain, seq), context)
    return hop, context.report.bytes


def file_of(spool: DeltaSpool, hop: SpooledHop, number: int = 0) -> Path:
    return spool.folder / "files" / f"{hop.files[number].blake3}.safetensors"


def other_process(spool: DeltaSpool) -> DeltaSpool:
    """Return the same spool as another process sees it, which has checked nothing yet."""
    return DeltaSpool(spool.folder)


def test_a_worker_finds_the_hop_and_its_files_lead_to_the_version(tmp_path: Path) -> None:
    chain = grown_chain()
    spool = DeltaSpool(tmp_path / "spool")
    assert spool.hop(chain.ref(1), 2) is None
    hop, fetched = put(spool, chain, 2)
    assert fetched == hop.nbytes == chain.commits[2].stored_bytes
    worker = other_process(spool)
    found = worker.hop(chain.ref(1), 2)
    assert found == hop == SpooledHop(chain.commits[1], chain.commits[2], chain.commits[2].files, "commit")
    assert found is not None
    assert (found.base_ref, found.target_ref) == (hop.base_ref, hop.target_ref) == (chain.ref(1), chain.ref(2))
    state = copied(first_state())
    names = sorted(state)
    for entry in found.files:
        part = names[entry.first or 0 :][: entry.count]
        deltawire.apply_delta({name: state[name] for name in part}, worker.open(entry))
    assert bits_of(state) == bits_of(chain.states[2] or {})
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700
    assert put(spool, chain, 2) == (hop, 0)


def test_hops_without_files_and_skips_and_listed_files_come_back_as_they_were_put(tmp_path: Path) -> None:
    chain = grown_chain()
    chain.claim(2)
    chain.rewind(2)
    chain.listed = True
    chain.delta()
    chain.listed = False
    chain.add_skip(4, 1)
    spool = DeltaSpool(tmp_path)
    for base, seq, source in [(4, 5, "fence"), (5, 4, "fence"), (2, 6, "rewind"), (6, 2, "rewind"), (6, 7, "commit"), (1, 4, "skip")]:
        context = context_of(chain.store)
        for hop in context.routes.find(chain.ref(base), chain.commits[seq]):
            put_hop = spool.put(hop, context)
            found = other_process(spool).hop(chain.ref(put_hop.base.seq), put_hop.target.seq)
            assert found == put_hop
            assert found.files == hop.files
            assert found.source == hop.source
        if (base, seq) == (1, 4):
            continue  # for such small files, the planner may take the deltas
        assert (found.base.seq, found.target.seq, found.source) == (base, seq, source)


def test_a_full_checkpoint_is_no_hop(tmp_path: Path) -> None:
    chain = grown_chain()
    context = context_of(chain.store)
    with pytest.raises(ValueError, match="only a delta"):
        DeltaSpool(tmp_path).put(context.routes.find(None, chain.commits[1])[0], context)


@pytest.mark.parametrize("step", ["file", "manifest"])
def test_a_writer_that_dies_before_the_manifest_leaves_no_hop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    class Killed(BaseException):
        pass

    chain = grown_chain()
    spool = DeltaSpool(tmp_path)
    replaced: list[str] = []

    def replace(source: Path, target: Path) -> None:
        replaced.append(target.name)
        if len(replaced) == (2 if step == "file" else 3):
            raise Killed
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(Killed):
            put(spool, chain, 2)
    worker = other_process(spool)
    assert worker.hop(chain.ref(1), 2) is None
    hop, fetched = put(worker, chain, 2)
    assert fetched == (hop.files[1].size if step == "file" else 0)
    assert worker.hop(chain.ref(1), 2) == hop


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def exchange(path: Path) -> None:
    """Exchange a file with the other one in its directory, as if two names had been swapped."""
    (other,) = set(path.parent.iterdir()) - {path}
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


DAMAGES: list[tuple[str, Callable[[Path], Any], bool]] = [
    ("torn", lambda path: os.truncate(path, 10), False),
    ("emptied", lambda path: os.truncate(path, 0), False),
    ("oversized", lambda path: path.write_bytes(path.read_bytes() + b"more"), False),
    ("deleted", lambda path: path.unlink(), False),
    ("swapped", exchange, False),
    ("flipped", flip, True),
    ("zeroed", lambda path: path.write_bytes(bytes(path.stat().st_size)), True),
]


@pytest.mark.parametrize(("damage", "keeps_size"), [row[1:] for row in DAMAGES], ids=[row[0] for row in DAMAGES])
def test_a_damaged_file_is_never_handed_out_and_is_fetched_again(tmp_path: Path, damage: Callable[[Path], Any], keeps_size: bool) -> None:
    chain = grown_chain()
    spool = DeltaSpool(tmp_path)
    hop, _ = put(spool, chain, 2)
    damage(file_of(spool, hop))
    worker = other_process(spool)
    assert (worker.hop(chain.ref(1), 2) == hop) is keeps_size
    with pytest.raises(SpoolError) as caught:
        worker.open(hop.files[0])
    assert caught.value.retryable
    _, fetched = put(other_process(spool), chain, 2)
    assert fetched >= hop.files[0].size
    assert bytes(other_process(spool).open(hop.files[0])) == chain.store.get(hop.files[0].key, limit=1 << 20)


def test_a_map_stays_valid_after_its_file_was_deleted(tmp_path: Path) -> None:
    chain = grown_chain()
    spool = DeltaSpool(tmp_path)
    hop, _ = put(spool, chain, 2)
    mapped = [spool.open(entry) for entry in hop.files]
    spool.keep_only(0)
    assert not list((tmp_path / "files").iterdir())
    assert [bytes(data) for data in mapped] == [chain.store.get(entry.key, limit=1 << 20) for entry in hop.files]
    with pytest.raises(SpoolError, match="not in the spool"):
        spool.open(hop.files[0])


def test_the_manifest_of_another_chain_is_ignored_and_replaced(tmp_path: Path) -> None:
    mine, theirs = grown_chain(), grown_chain()
    spool = DeltaSpool(tmp_path)
    put(spool, theirs, 2)
    assert spool.hop(mine.ref(1), 2) is None
    hop, _ = put(spool, mine, 2)
    assert spool.hop(mine.ref(1), 2) == hop
    os.rename(tmp_path / "hop-1-2.json", tmp_path / "hop-1-3.json")
    assert spool.hop(mine.ref(1), 3) is None


def manifest(tmp_path: Path, chain: ToyChain) -> tuple[Path, dict[str, Any]]:
    spool = DeltaSpool(tmp_path)
    put(spool, chain, 2)
    path = tmp_path / "hop-1-2.json"
    return path, json.loads(path.read_bytes())


@pytest.mark.parametrize(
    "changed",
    [
        {"files": []},
        {"files": [{"key": "../../etc/passwd"}]},
        {"files": "all"},
        {"source": "anchor"},
        {"source": "fence"},
        {"source": "skip", "files": []},
        {"base": "{}"},
        {"target": None},
        {"more": 1},
        {"deltawire": "commit"},
    ],
    ids=str,
)
def test_a_manifest_that_breaks_a_rule_is_no_manifest(tmp_path: Path, changed: dict[str, Any]) -> None:
    chain = grown_chain()
    path, document = manifest(tmp_path, chain)
    assert DeltaSpool(tmp_path).hop(chain.ref(1), 2) is not None
    path.write_bytes(dump(document | changed))
    assert DeltaSpool(tmp_path).hop(chain.ref(1), 2) is None
    DeltaSpool(tmp_path).keep_only(2)
    assert not path.exists()
    put(DeltaSpool(tmp_path), chain, 2)
    assert DeltaSpool(tmp_path).hop(chain.ref(1), 2) is not None


def test_files_of_a_manifest_that_overlap_or_name_a_path_are_refused(tmp_path: Path) -> None:
    chain = grown_chain()
    path, document = manifest(tmp_path, chain)
    first, second = document["files"]
    for files in ([second, first], [first | {"blake3": "../lock"}, second], [first | {"name": "model.safetensors"}, second]):
        for source in ("commit", "skip"):
            path.write_bytes(dump(document | {"files": files, "source": source}))
            assert DeltaSpool(tmp_path).hop(chain.ref(1), 2) is None


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a":' + b"[" * 100_000, b"[" * (1 << 20), b"{" + b" " * (33 << 20)]
)
def test_hostile_json_is_no_manifest(tmp_path: Path, text: bytes) -> None:
    chain = grown_chain()
    (tmp_path / "hop-1-2.json").write_bytes(text)
    assert DeltaSpool(tmp_path).hop(chain.ref(1), 2) is None


def test_a_manifest_of_a_newer_release_says_to_upgrade(tmp_path: Path) -> None:
    chain = grown_chain()
    path, document = manifest(tmp_path, chain)
    path.write_bytes(dump(document | {"version": 2}))
    with pytest.raises(UnsupportedVersion, match="Upgrade"):
        DeltaSpool(tmp_path).hop(chain.ref(1), 2)
    put(DeltaSpool(tmp_path), chain, 2)
    assert DeltaSpool(tmp_path).hop(chain.ref(1), 2) is not None


def test_only_the_hops_that_were_put_last_are_kept(tmp_path: Path) -> None:
    chain = grown_chain()
    spool = DeltaSpool(tmp_path)
    for age, seq in [(30, 3), (20, 2), (10, 4)]:  # the hop to 3 was put first
        put(spool, chain, seq)
        path = tmp_path / f"hop-{seq - 1}-{seq}.json"
        os.utime(path, ns=(path.stat().st_mtime_ns - age * 10**9,) * 2)
    (tmp_path / "hop-8-9.part").touch()
    (tmp_path / "files" / "stray.part").touch()
    spool.keep_only(2)
    assert [spool.hop(chain.ref(seq - 1), seq) is not None for seq in (2, 3, 4)] == [True, False, True]
    wanted = {entry.blake3 for seq in (2, 4) for entry in chain.commits[seq].files}
    assert {path.stem for path in (tmp_path / "files").iterdir()} == wanted
    assert not list(tmp_path.glob("*.part"))


def test_older_hops_make_room_and_a_hop_that_can_never_fit_is_refused(tmp_path: Path) -> None:
    chain = grown_chain()
    sizes = [chain.commits[seq].stored_bytes for seq in (2, 3, 4)]
    spool = DeltaSpool(tmp_path, most_bytes=max(sizes) * 2 - 1)
    for seq in (2, 3, 4):
        put(spool, chain, seq)
        held = sum(path.stat().st_size for path in (tmp_path / "files").iterdir())
        assert held <= max(sizes) * 2 - 1
    assert spool.hop(chain.ref(3), 4) is not None
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(SpoolError, match="are allowed") as caught:
        put(DeltaSpool(tmp_path, most_bytes=10), chain, 3)
    assert not caught.value.retryable
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_full_disk_costs_older_hops_first_and_then_a_retryable_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = grown_chain()
    spool = DeltaSpool(tmp_path)
    put(spool, chain, 2)
    capacity = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    write = Path.write_bytes

    def limited(path: Path, data: bytes) -> int:
        used = sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file() and each != path)
        write(path, data[: max(0, capacity - used)])
        if used + len(data) > capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return len(data)

    capacity += 2000
    monkeypatch.setattr(Path, "write_bytes", limited)
    put(spool, chain, 3)
    assert spool.hop(chain.ref(1), 2) is None
    assert spool.hop(chain.ref(2), 3) is not None
    capacity = 100
    with pytest.raises(SpoolError, match="No space left") as caught:
        put(spool, chain, 4)
    assert caught.value.retryable
    assert spool.hop(chain.ref(3), 4) is None
    assert not list(tmp_path.rglob("*.part"))
    capacity = 1 << 20
    put(spool, chain, 4)
    assert spool.hop(chain.ref(3), 4) is not None


def test_data_that_is_damaged_in_the_store_is_not_put(tmp_path: Path) -> None:
    chain = grown_chain()
    chain.damage(chain.commits[2].files[1])
    spool = DeltaSpool(tmp_path)
    with pytest.raises(DataDamaged):
        put(spool, chain, 2)
    assert spool.hop(chain.ref(1), 2) is None


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(SpoolError, match="only this user"):
        put(DeltaSpool(folder), grown_chain(), 2)
    assert not list(folder.iterdir())
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(SpoolError, match="only this user"):
        put(DeltaSpool(tmp_path / "link"), grown_chain(), 2)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_the_usual_directory_is_in_memory_if_there_is_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    in_memory, in_cache = Path(f"/dev/shm/deltawire-{os.getuid()}"), tmp_path / "deltawire" / "spools"
    gigabyte = 1 << 30
    for free, delta_bytes, folder in [
        (8 * gigabyte, 0, in_memory),
        (8 * gigabyte, 2 * gigabyte, in_memory),
        (8 * gigabyte, 3 * gigabyte, in_cache),
        (64 << 20, 0, in_cache),  # as in a container
    ]:
        monkeypatch.setattr(delta_spool.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        found = default_spool("s3://a/b", delta_bytes)
        assert found.parent == folder
        assert default_spool("s3://a/b", delta_bytes) == found != default_spool("s3://a/c", delta_bytes)
    assert in_memory.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_a_directory_in_memory_that_others_can_write_to_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another user may have made it first, with links to the files of this one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(delta_spool.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    user = 10**9 + os.getpid()
    monkeypatch.setattr(delta_spool.os, "getuid", lambda: user)
    root, mine = Path(f"/dev/shm/deltawire-{user}"), tmp_path / "mine"
    mine.mkdir()
    (mine / "file").touch()
    try:
        (root / "x").mkdir(parents=True)
        (root / "x" / "shards").symlink_to(mine)
        assert default_spool("s3://a/b").parent == tmp_path / "cache" / "deltawire" / "spools"
        assert (mine / "file").exists()
    finally:
        shutil.rmtree(root)


def test_hops_in_a_directory_that_others_can_write_to_are_refused(tmp_path: Path) -> None:
    chain = grown_chain()
    spool = DeltaSpool(tmp_path / "spool")
    hop, _ = put(spool, chain, 2)
    spool.folder.chmod(0o770)
    with pytest.raises(SpoolError, match="only this user can write to"):
        other_process(spool).hop(chain.ref(1), 2)
    spool.folder.chmod(0o700)
    assert other_process(spool).hop(chain.ref(1), 2) == hop


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_memory_that_killed_servers_of_other_chains_have_left_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_spool.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    left = default_spool(f"s3://a/{os.getpid()}")
    try:
        for server in ("dead", "running"):
            (left / "kept" / server).mkdir(parents=True)
            (left / "kept" / server / "alive").touch()
        (left / "shards").mkdir()
        (left / "shards" / "a.part").touch()
        running = FileLock.try_shared(left / "kept" / "running" / "alive")
        assert running is not None
        default_spool("s3://a/b")
        assert [path.name for path in (left / "kept").iterdir()] == ["running"]
        assert not list((left / "shards").iterdir())
        running.release()
    finally:
        shutil.rmtree(left)


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_deltas_that_a_killed_sidecar_has_left_are_deleted_by_the_next_one(
    has_room: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(delta_spool.shutil, "disk_usage", lambda _: SimpleNamespace(free=has_room * (1 << 40)))
    chain = grown_chain()
    held = []
    for number in range(2):
        spool = DeltaSpool(default_spool(f"s3://{os.getpid()}/{has_room}{number}"))
        held.append(spool.hold())
        put(spool, chain, 2)
    left, used = (default_spool(f"s3://{os.getpid()}/{has_room}{number}") for number in range(2))
    try:
        held[0].release()  # its process has ended
        default_spool("s3://a/b")
        assert not left.exists()
        assert len(list((used / "files").iterdir())) == len(chain.commits[2].files)
    finally:
        held[1].release()
        default_spool("s3://a/b")
    assert not used.exists()


class SlowStore(WrappedStore):
    """Waits in its first read of data until it is told to continue."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read_into(self, key: str, buffer: memoryview, **more: Any) -> None:
        if key.startswith("data/"):
            self.reading.set()
            assert self.go_on.wait(60)
        super().read_into(key, buffer, **more)


PUTTER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from spooled_chain import context_of
from deltawire.store.local import LocalStore
from deltawire.store.wrapped import WrappedStore
from deltawire.subscribe.spool.delta_spool import DeltaSpool

class Telling(WrappedStore):
    def read_into(self, key, buffer, **more):
        if key.startswith("data/"):
            os.write(1, b"reading\\n")  # one call: several threads may be here
            os.read(0, 1)
        super().read_into(key, buffer, **more)

context = context_of(Telling(LocalStore(sys.argv[1])))
log = context.log
base = log.read(1)
hop = context.routes.find(base.ref(log.hash(1)), log.read(2))[-1]
DeltaSpool(Path(sys.argv[2])).put(hop, context)
print(context.report.bytes, flush=True)
"""


def putting_process(store: Path, spool: Path) -> subprocess.Popen[str]:
    tests = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [PACKAGE, tests]))}
    command = [sys.executable, "-W", "error", "-c", PUTTER, str(store), str(spool), str(Path(__file__).resolve().parent)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("is_killed", [False, True])
def test_two_processes_fetch_once_and_a_killed_one_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool) -> None:
    chain = directory_chain(tmp_path / "store")
    spool = DeltaSpool(tmp_path / "spool")
    waits = threading.Event()
    monkeypatch.setattr(delta_spool.time, "sleep", lambda seconds: waits.set() or threading.Event().wait(seconds))
    done: list[tuple[SpooledHop, int]] = []
    with putting_process(tmp_path / "store", spool.folder) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "reading\n"  # it holds the lock
        mine = threading.Thread(target=lambda: done.append(put(spool, chain, 2)))
        mine.start()
        assert waits.wait(60)
        assert not done
        assert spool.hop(chain.ref(1), 2) is None
        if is_killed:
            other.send_signal(signal.SIGKILL)
        else:
            other.stdin.write("x" * 8)
            other.stdin.flush()
        mine.join(60)
        rest = other.stdout.read()
    (hop, fetched) = done[0]
    assert fetched == (hop.nbytes if is_killed else 0)
    assert is_killed or rest.endswith(f"{hop.nbytes}\n")
    assert spool.hop(chain.ref(1), 2) == hop


def test_two_threads_fetch_once_and_cleaning_waits_for_nobody(tmp_path: Path) -> None:
    chain = grown_chain()
    store = SlowStore(chain.store)
    spool = DeltaSpool(tmp_path)
    done: list[int] = []

    def fetch() -> None:
        context = context_of(store)
        spool.put(hop_of(context, chain, 2), context)
        done.append(context.report.bytes)

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert store.reading.wait(60)
    DeltaSpool(tmp_path).keep_only(0)  # would delete the file that is being written
    store.go_on.set()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == [0, chain.commits[2].stored_bytes]


def test_a_put_that_is_no_longer_wanted_does_not_wait_for_the_lock(tmp_path: Path) -> None:
    chain = grown_chain()
    store = SlowStore(chain.store)
    context = context_of(store)
    first = threading.Thread(target=lambda: DeltaSpool(tmp_path).put(hop_of(context, chain, 2), context))
    first.start()
    assert store.reading.wait(60)
    halted = context_of(chain.store)
    halted.is_halted = lambda: True
    with pytest.raises(SpoolError, match="another process") as caught:
        DeltaSpool(tmp_path).put(hop_of(halted, chain, 3), halted)
    assert caught.value.retryable
    store.go_on.set()
    first.join(60)


def test_shards_are_shared_by_the_processes_that_load_and_deleted_by_the_last(tmp_path: Path) -> None:
    chain = ToyChain(MemoryStore(), shards=4)
    chain.anchor(first_state())
    context = context_of(chain.store)
    anchor = context.routes.find(None, chain.commits[1])[0]
    shards = [entry for entry in anchor.files if str(entry.name).endswith(".safetensors")]
    one, two = DeltaSpool(tmp_path), DeltaSpool(tmp_path)
    folder = tmp_path / "shards"
    with one.loading():
        with two.loading():
            paths = [one.shard(anchor, entry, context) for entry in shards[:2]]
            assert [path.read_bytes() for path in paths] == [chain.store.get(entry.key, limit=1 << 20) for entry in shards[:2]]
            other = context_of(chain.store)
            assert two.shard(anchor, shards[1], other) == paths[1]
            assert other.report.bytes == 0
            two.shard(anchor, shards[2], other)
            assert other.report.bytes == shards[2].size
            assert {path.stem for path in folder.iterdir()} == {shards[1].blake3, shards[2].blake3}
        one.keep_only(0)
        assert len(list(folder.iterdir())) == 2
    assert not list(folder.iterdir())
    (folder / "left.part").touch()  # by a process that was killed
    one.keep_only(0)
    assert not list(folder.iterdir())


def test_a_local_store_gives_the_same_hops(tmp_path: Path) -> None:
    chain = directory_chain(tmp_path / "store")
    spool = DeltaSpool(tmp_path / "spool")
    hop, _ = put(spool, chain, 3)
    assert isinstance(chain.store, LocalStore)
    assert other_process(spool).hop(chain.ref(2), 3) == hop
