"""Several processes share a mirror, are killed at any step, or lag behind. The mirror always serves one whole version."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from forked_python import ForkedPopen
from safetensors import safe_open
from support import bits_of
from toy_chain import ToyChain, first_state

import deltawire
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import (
    CheckpointError,
    MirrorError,
    NoChain,
    RollbackDetected,
    RunMismatch,
    SignatureInvalid,
    StoreUnavailable,
    VersionUnknown,
)
from deltawire.events import Event
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.format.records.signing import SigningKey
from deltawire.store import keys, open_store
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber, pull, reading_mirror
from deltawire.subscribe.mirror import mirror_replica
from deltawire.subscribe.mirror.slot import boot_id


@pytest.fixture
def chain(tmp_path: Path) -> ToyChain:
    chain = ToyChain(open_store(tmp_path / "store"))
    chain.anchor(first_state())
    return chain


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


def whole_versions(chain: ToyChain) -> list[Any]:
    return [bits_of(state) for state in chain.states if state is not None]


def served(mirror: Path) -> Any:
    with reading_mirror(mirror) as path:
        return bits_of(Checkpoint(path))


def synced(chain: ToyChain, mirror: Path, **options: Any) -> int:
    with Subscriber(chain.store, mirror, options=ReaderOptions(patience=0.0, **options)) as subscriber:
        return subscriber.sync().seq


CHILD = """
import os, signal, sys
from deltawire.chain.reader_options import ReaderOptions
from deltawire.subscribe import Subscriber

store, mirror, step, nth = sys.argv[1:]
left = [int(nth)]
def die(reached):
    if reached == step:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

subscriber = Subscriber(store, mirror, options=ReaderOptions(patience=0.0))
subscriber._mirrored._mirror.step = die
subscriber.sync()
"""


def child(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start a separate Python process."""
    return ForkedPopen("light", ["-W", "error", "-c", code, *arguments], text=True, **options)


STEPS = ["route-chosen", "slot-made", "slot-copied", "hop-fetched", "file-applied", "digest-checked", "marked-clean", "lock-shared"]
STEPS += ["link-made", "served", "files-linked", "tidied"]


@pytest.mark.parametrize(("step", "nth"), [*((step, 1) for step in STEPS), ("file-applied", 2), ("hop-done", 2), ("file-applied", 4)])
def test_a_process_killed_at_any_step_leaves_a_whole_version_and_the_next_continues(
    chain: ToyChain, mirror: Path, step: str, nth: int
) -> None:
    synced(chain, mirror)
    chain.grow(2)
    killed = child(CHILD, chain.store.url, mirror, step, nth)
    assert killed.wait(300) == -signal.SIGKILL
    assert served(mirror) in whole_versions(chain)
    chain.delta()
    assert synced(chain, mirror) == 4
    assert served(mirror) == bits_of(chain.state)
    assert len(os.listdir(mirror / "slots")) <= 2


@pytest.mark.parametrize("step", ["marked-dirty", "file-applied", "marked-clean", "served"])
def test_a_process_killed_while_it_changes_the_standby_leaves_the_other_slot(chain: ToyChain, mirror: Path, step: str) -> None:
    synced(chain, mirror)
    chain.delta()
    synced(chain, mirror)
    chain.delta()
    assert child(CHILD, chain.store.url, mirror, step, 1).wait(300) == -signal.SIGKILL
    assert served(mirror) == bits_of(chain.states[3 if step == "served" else 2] or {})
    synced(chain, mirror)
    assert served(mirror) == bits_of(chain.state)


@pytest.mark.parametrize("nth", [1, 3])
def test_a_process_killed_while_the_first_anchor_arrives_leaves_no_version_and_the_next_continues(
    chain: ToyChain, mirror: Path, nth: int
) -> None:
    assert child(CHILD, chain.store.url, mirror, "anchor-file-fetched", nth).wait(300) == -signal.SIGKILL
    with pytest.raises(MirrorError):
        served(mirror)
    with Subscriber(chain.store, mirror) as subscriber:
        assert subscriber.version is None
        subscriber.sync()
    assert served(mirror) == bits_of(chain.state)


FOLLOWER = """
import sys
import deltawire
from deltawire.subscribe import Subscriber

store, mirror, last = sys.argv[1:]
with Subscriber(store, mirror) as subscriber:
    subscriber.sync()
    versions = subscriber.follow(poll=0.01)
    while True:
        version = subscriber.version
        assert deltawire.state_digest(subscriber.state) == version.digest, version
        print(version.seq, flush=True)
        if version.seq >= int(last):
            break
        next(versions)
"""


def test_processes_share_a_mirror_and_each_sees_only_whole_versions(chain: ToyChain, mirror: Path) -> None:
    followers = [child(FOLLOWER, chain.store.url, mirror, 25, stdout=subprocess.PIPE) for _ in range(3)]
    watching = threading.Event()
    torn: list[Any] = []

    def watch() -> None:
        while not watching.is_set():
            if (mirror / "current").exists():
                with reading_mirror(mirror) as path:
                    record = json.loads((path / "deltawire.json").read_text())
                    if deltawire.state_digest(Checkpoint(path)).hex() != record["digest"]:
                        torn.append(record)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        chain.grow(24)
        for follower in followers:
            output, _ = follower.communicate(timeout=120)
            assert follower.returncode == 0
            seqs = list(map(int, output.split()))
            assert seqs == sorted(set(seqs))
            assert seqs[-1] == 25
    finally:
        watching.set()
        thread.join()
        for follower in followers:
            follower.kill()
            follower.communicate()
    assert torn == []
    assert served(mirror) == bits_of(chain.state)
    synced(chain, mirror)
    chain.delta()
    synced(chain, mirror)
    assert len(os.listdir(mirror / "slots")) <= 3


def test_one_of_several_subscribers_updates_the_mirror_and_the_others_adopt_it(chain: ToyChain, mirror: Path) -> None:
    events: list[Event] = []
    with Subscriber(chain.store, mirror) as first, Subscriber(chain.store, mirror, on_event=events.append) as second:
        first.sync()
        second.sync()
        for _ in range(3):
            chain.delta()
            first.sync()
            second.sync()
            assert bits_of(second.state) == bits_of(chain.state)
        assert [event.fields["objects"] for event in events if event.name == "synced"] == [0, 0, 0, 0]
        assert len(os.listdir(mirror / "slots")) == 2


def test_the_served_state_does_not_change_until_the_next_sync(chain: ToyChain, mirror: Path) -> None:
    with Subscriber(chain.store, mirror) as laggard, Subscriber(chain.store, mirror) as other:
        laggard.sync()
        arrays = dict(laggard.state)
        before = bits_of(chain.state)
        for _ in range(4):
            chain.delta()
            other.sync()
            assert bits_of(arrays) == bits_of(laggard.state) == before
            assert laggard.path is not None
            assert bits_of(Checkpoint(laggard.path)) == before
        assert laggard.sync().seq == 5
        assert bits_of(laggard.state) == bits_of(chain.state)


def test_it_opens_without_the_store(chain: ToyChain, mirror: Path, tmp_path: Path) -> None:
    synced(chain, mirror)
    os.rename(tmp_path / "store", tmp_path / "elsewhere")
    with Subscriber(tmp_path / "store", mirror) as subscriber:
        assert bits_of(subscriber.state) == bits_of(chain.state)
        assert subscriber.version is not None
        assert (subscriber.version.seq, subscriber.version.meta) == (1, {"name": "v1"})
        with pytest.raises(NoChain):
            subscriber.sync()
        assert bits_of(subscriber.state) == bits_of(chain.state)


def test_it_loads_as_a_checkpoint_at_any_time(chain: ToyChain, mirror: Path) -> None:
    with Subscriber(chain.store, mirror) as subscriber:
        for _ in range(4):
            subscriber.sync()
            assert bits_of(Checkpoint(mirror)) == bits_of(chain.state)
            tensors = {}
            for path in mirror.glob("*.safetensors"):
                with safe_open(path, framework="numpy") as file:
                    names = list(file.keys())
                    tensors.update({name: file.get_tensor(name).tobytes() for name in names})
            assert tensors == {name: array.tobytes() for name, array in chain.state.items()}
            chain.delta()


def test_after_a_reboot_a_torn_slot_is_replaced_by_the_other_and_then_healed(
    chain: ToyChain, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced(chain, mirror)
    chain.delta()
    synced(chain, mirror)
    shard = (mirror / "current" / "model-00001-of-00002.safetensors").resolve()
    data = bytearray(shard.read_bytes())
    data[-2] ^= 16
    shard.write_bytes(data)
    monkeypatch.setattr("deltawire.subscribe.mirror.mirror.boot_id", lambda: "another boot")
    monkeypatch.setattr("deltawire.subscribe.mirror.mirror_update.boot_id", lambda: "another boot")
    with Subscriber(chain.store, mirror) as subscriber:
        assert subscriber.version is not None
        assert subscriber.version.seq == 1
        assert bits_of(subscriber.state) == bits_of(chain.states[1] or {})
        subscriber.sync()
        assert bits_of(subscriber.state) == bits_of(chain.state)
    assert served(mirror) == bits_of(chain.state)


def test_the_boot_stays_the_same_while_the_system_runs() -> None:
    assert boot_id() == boot_id()


def test_a_store_that_went_back_is_noticed_by_a_new_process_too(chain: ToyChain, mirror: Path) -> None:
    chain.grow(3)
    synced(chain, mirror)
    chain.store.delete([keys.commit_key(4)])
    with Subscriber(chain.store, mirror) as subscriber:
        with pytest.raises(RollbackDetected):
            subscriber.sync()
        assert bits_of(subscriber.state) == bits_of(chain.state)


def test_forgetting_what_was_seen_is_refused(chain: ToyChain, mirror: Path) -> None:
    synced(chain, mirror)
    (mirror / "seen.json").write_text("{}")
    with pytest.raises(MirrorError, match="damaged"):
        synced(chain, mirror)


def test_a_mirror_is_not_opened_if_no_trusted_key_signed_its_version(mirror: Path) -> None:
    key = SigningKey.generate()
    chain = ToyChain(MemoryStore(), sign=key.sign)
    chain.anchor(first_state())
    synced(chain, mirror, trusted_keys=[key.public])
    synced(chain, mirror, trusted_keys=[key.public])
    with pytest.raises(SignatureInvalid):
        Subscriber(chain.store, mirror, options=ReaderOptions(trusted_keys=[SigningKey.generate().public]))


def test_a_mirror_of_another_run_is_refused(chain: ToyChain, mirror: Path) -> None:
    synced(chain, mirror)
    other = ToyChain(MemoryStore())
    other.anchor(first_state(5))
    with pytest.raises(RunMismatch):
        synced(other, mirror)
    assert served(mirror) == bits_of(chain.state)


def test_a_directory_that_cannot_be_a_mirror_is_refused(chain: ToyChain, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MirrorError):
        synced(chain, tmp_path / "file")
    with pytest.raises(MirrorError):
        synced(chain, tmp_path)  # the directory holds other files


def test_a_full_disk_is_an_error_that_heals(chain: ToyChain, mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced(chain, mirror)
    chain.delta()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfileobj", full)
        with pytest.raises(MirrorError, match="No space") as caught:
            synced(chain, mirror)
    assert caught.value.retryable
    assert served(mirror) == bits_of(chain.states[1] or {})
    synced(chain, mirror)
    assert served(mirror) == bits_of(chain.state)


def test_a_subscriber_that_waits_for_another_process_can_be_closed(chain: ToyChain, mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced(chain, mirror)
    chain.delta()
    with Subscriber(chain.store, mirror) as subscriber:
        assert subscriber._mirrored is not None
        writer = subscriber._mirrored._mirror.try_writer()
        assert writer is not None
        waiting = threading.Event()
        sleep = mirror_replica.time.sleep
        monkeypatch.setattr(mirror_replica.time, "sleep", lambda seconds: waiting.set() or sleep(seconds))
        thread = threading.Thread(target=lambda: list(subscriber.follow(poll=0.01)))
        thread.start()
        assert waiting.wait(300)
        subscriber.close()
        thread.join(300)
        assert not thread.is_alive()
        writer.release()


def test_opening_does_not_wait_for_a_process_that_fetches_the_first_version(chain: ToyChain, mirror: Path) -> None:
    with Subscriber(chain.store, mirror) as first:
        assert first._mirrored is not None
        opened: list[Subscriber] = []

        def open_another(step: str) -> None:
            if step == "anchor-file-fetched" and not opened:
                opened.append(Subscriber(chain.store, mirror))

        first._mirrored._mirror.step = open_another
        first.sync()
        with opened[0] as second:
            assert second.version is None
            assert second.sync() == first.version
            assert bits_of(second.state) == bits_of(chain.state)


@pytest.fixture(params=["memory", "directory"])
def any_chain(request: pytest.FixtureRequest, tmp_path: Path) -> ToyChain:
    chain = ToyChain(MemoryStore() if request.param == "memory" else open_store(tmp_path / "store"))
    chain.anchor(first_state(), extra={"tokenizer.json": b"{}"})
    chain.grow(4)
    return chain


def test_pull_writes_any_version_as_a_plain_checkpoint(any_chain: ToyChain, tmp_path: Path) -> None:
    fetched: list[int] = []
    events: list[Event] = []
    version = pull(any_chain.store, tmp_path / "newest", progress=fetched.append, on_event=events.append)
    assert version.seq == 5
    assert bits_of(Checkpoint(tmp_path / "newest")) == bits_of(any_chain.state)
    assert (tmp_path / "newest" / "tokenizer.json").read_bytes() == b"{}"
    planned = next(event for event in events if event.name == "planned")
    assert sum(fetched) == planned.fields["bytes"]
    assert pull(any_chain.store, tmp_path / "older", seq=3).seq == 3
    assert bits_of(Checkpoint(tmp_path / "older")) == bits_of(any_chain.states[3] or {})
    names = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
    assert set(os.listdir(tmp_path / "older")) == {*names, "config.json", "tokenizer.json"}
    assert list(any_chain.store.list(keys.PINS)) == []


def test_pull_takes_attachments_of_any_name(tmp_path: Path) -> None:
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state(), extra={"deltas.tmp": b"1", "deltawire.json.tmp-0": b"2"})
    chain.delta()
    pull(chain.store, tmp_path / "out")
    assert bits_of(Checkpoint(tmp_path / "out")) == bits_of(chain.state)
    assert ((tmp_path / "out" / "deltas.tmp").read_bytes(), (tmp_path / "out" / "deltawire.json.tmp-0").read_bytes()) == (b"1", b"2")
    assert not list((tmp_path / "out").glob(".*"))


def test_pull_does_not_overwrite_unless_it_is_told_to(any_chain: ToyChain, tmp_path: Path) -> None:
    pull(any_chain.store, tmp_path / "out", seq=2)
    with pytest.raises(CheckpointError, match="exists"):
        pull(any_chain.store, tmp_path / "out")
    assert bits_of(Checkpoint(tmp_path / "out")) == bits_of(any_chain.states[2] or {})
    pull(any_chain.store, tmp_path / "out", replace=True)
    assert bits_of(Checkpoint(tmp_path / "out")) == bits_of(any_chain.state)


def test_pull_finds_another_route_around_damage(any_chain: ToyChain, tmp_path: Path) -> None:
    any_chain.damage(any_chain.add_anchor(4).files[1])
    any_chain.lose(any_chain.add_skip(5, 1).files[0])
    pull(any_chain.store, tmp_path / "out", options=ReaderOptions(patience=0.0))
    assert bits_of(Checkpoint(tmp_path / "out")) == bits_of(any_chain.state)


def test_pull_that_fails_leaves_nothing(any_chain: ToyChain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VersionUnknown):
        pull(any_chain.store, tmp_path / "out", seq=77)

    def unavailable(*_: object, **__: object) -> None:
        raise StoreUnavailable("no answer.")

    monkeypatch.setattr(any_chain.store, "read_into", unavailable)
    with pytest.raises(StoreUnavailable):
        pull(any_chain.store, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == []
