"""Test the small parts of a reader: locks, files that are replaced whole, the delta cache, pins and pauses."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from toy_chain import ToyChain

from deltawire.errors import MirrorError, StoreUnavailable
from deltawire.events import Event
from deltawire.format.records.record_parts import CommitRef
from deltawire.store import keys
from deltawire.store.memory import MemoryStore
from deltawire.subscribe.cache.delta_cache import DeltaCache
from deltawire.subscribe.follow import pause
from deltawire.subscribe.mirror.durable_json import read_json, remove_leftovers, write_json
from deltawire.subscribe.mirror.locks import FileLock
from deltawire.subscribe.pin_keeper import PinKeeper, reader_name
from deltawire.subscribe.seen import SeenFile


def test_a_lock_is_shared_or_held_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert FileLock.try_shared(path) is None  # there is no file yet
    alone = FileLock.try_exclusive(path)
    assert alone is not None
    assert FileLock.try_shared(path) is None
    assert FileLock.try_exclusive(path) is None
    alone.share()
    other = FileLock.try_shared(path)
    assert other is not None
    alone.release()
    alone.release()
    assert FileLock.try_exclusive(path) is None
    other.release()
    with FileLock.wait_exclusive(path):
        assert FileLock.try_shared(path) is None


def test_a_json_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert read_json(path) is None
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    (tmp_path / ".a.json.tmp-0").write_text("")
    remove_leftovers(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_json_too_deep_to_read_is_taken_for_none(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a":' + "[" * 200_000 + "]" * 200_000 + "}")
    assert read_json(path) is None
    (tmp_path / "seen.json").write_text(path.read_text())
    with pytest.raises(MirrorError, match="damaged"):
        SeenFile(tmp_path).read()


def test_the_delta_cache_fetches_what_is_missing_or_torn_and_keeps_the_newest(tmp_path: Path) -> None:
    chain = ToyChain(MemoryStore())
    entries = [chain.upload(bytes([number]) * 100, "safetensors", raw=0) for number in range(3)]
    cache = DeltaCache(tmp_path)

    def fetch(wanted: object) -> object:
        return [(entry, memoryview(chain.store.get(entry.key, limit=100))) for entry in wanted]  # type: ignore[attr-defined]

    assert cache.ensure(entries, fetch) == entries  # type: ignore[arg-type]
    assert cache.ensure(entries, fetch) == []  # type: ignore[arg-type]
    (tmp_path / f"{entries[1].blake3}.safetensors").write_bytes(bytes(100))
    assert cache.ensure(entries, fetch) == [entries[1]]  # type: ignore[arg-type]
    assert bytes(cache.open(entries[1])) == b"\1" * 100
    cache.keep_only(entries, 250)
    assert [cache.holds(entry) for entry in entries] == [False, True, True]
    cache.keep_only([], 250)
    assert list(tmp_path.iterdir()) == []


def test_a_pin_is_renewed_at_a_third_of_its_life_and_lowered_at_once() -> None:
    chain = ToyChain(MemoryStore())
    written: list[int] = []
    now = [0.0]
    keeper = PinKeeper(chain.store, "me", ttl=30, clock=lambda: now[0])
    put = chain.store.put
    chain.store.put = lambda key, data, **more: (written.append(int(now[0])), put(key, data, **more))[1]  # type: ignore[method-assign]
    for seconds, seq in ((0, 5), (5, 6), (9, 6), (11, 7), (12, 7), (13, 3), (14, 3)):
        now[0] = seconds
        keeper.hold(chain.run, seq)
    assert written == [0, 11, 13]
    keeper.release()
    keeper.release()
    assert list(chain.store.list(keys.PINS)) == []


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no clock that counts suspension")
def test_a_pin_is_renewed_after_the_machine_was_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """`time.monotonic` stops while the machine is suspended. The store's clock, by which the pin expires, does not."""
    chain = ToyChain(MemoryStore())
    asleep = [0.0]
    monkeypatch.setattr(time, "clock_gettime", lambda clock: asleep[0] if clock == time.CLOCK_BOOTTIME else 0.0)
    keeper = PinKeeper(chain.store, "me", ttl=30)
    keeper.hold(chain.run, 5)
    chain.store.delete([keys.pin_key("me")])
    asleep[0] = 3600.0
    keeper.hold(chain.run, 5)
    assert [info.key for info in chain.store.list(keys.PINS)] == [keys.pin_key("me")]


def test_a_pin_is_renewed_while_bytes_arrive_and_never_after_it_was_released() -> None:
    chain = ToyChain(MemoryStore())
    written: list[int] = []
    now = [0.0]
    keeper = PinKeeper(chain.store, "me", ttl=30, clock=lambda: now[0])
    put = chain.store.put
    chain.store.put = lambda key, data, **more: (written.append(int(now[0])), put(key, data, **more))[1]  # type: ignore[method-assign]
    keeper.renew(1)
    keeper.hold(chain.run, 5)
    for seconds in (1, 9, 10, 11, 19, 20, 21):
        now[0] = seconds
        keeper.renew(1000)
    assert written == [0, 10, 20]
    keeper.release()
    now[0] = 100
    keeper.renew(1000)
    keeper.hold(chain.run, 5)
    assert list(chain.store.list(keys.PINS)) == []


def test_a_pin_that_cannot_be_written_is_tried_again_but_not_at_every_turn() -> None:
    chain = ToyChain(MemoryStore())
    events: list[Event] = []
    now = [0.0]

    def fails(*_: object, **__: object) -> None:
        raise StoreUnavailable("no answer.")

    chain.store.put = fails  # type: ignore[method-assign]
    keeper = PinKeeper(chain.store, "me", ttl=30, clock=lambda: now[0], on_event=events.append)
    for seconds in (0.0, 0.1, 0.5, 1.1):
        now[0] = seconds
        keeper.hold(chain.run, 1)
    assert [event.name for event in events] == ["pin-failed"] * 2


def test_readers_have_names_of_their_own() -> None:
    assert reader_name() != reader_name()
    keys.pin_key(reader_name())
    with pytest.raises(ValueError, match="cannot name a reader"):
        PinKeeper(MemoryStore(), "../x")


def test_a_file_that_appears_just_after_it_was_looked_for_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_too_early(path: Path, *arguments: Any) -> None:
        monkeypatch.undo()
        path.write_text(json.dumps({"seq": 3, "commit": "a" * 64}))  # another process notes its first version
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "open", open_too_early)
    assert SeenFile(tmp_path).read() is None
    assert SeenFile(tmp_path).read() == CommitRef(3, "a" * 64, None)


def test_the_newest_seen_version_only_ever_rises(tmp_path: Path) -> None:
    seen = SeenFile(tmp_path)
    seen.remember(CommitRef(3, "a" * 64, None))  # there is no mirror yet
    assert seen.read() is None
    (tmp_path / "locks").mkdir()
    for seq in (5, 3):
        seen.remember(CommitRef(seq, f"{seq}" * 64, None))
    assert seen.read() == CommitRef(5, "5" * 64, None)
    (tmp_path / "seen.json").write_text('{"seq": -1, "commit": ""}')
    with pytest.raises(MirrorError, match="damaged"):
        seen.read()


@pytest.mark.parametrize(
    ("failures", "jitter", "seconds"), [(0, 0.5, 1.0), (0, 0.0, 0.75), (0, 1.0, 1.25), (3, 0.5, 8.0), (9, 0.5, 60.0), (10**6, 0.5, 60.0)]
)
def test_pauses_grow_with_failures(failures: int, jitter: float, seconds: float) -> None:
    assert pause(1.0, failures, lambda: jitter) == seconds
