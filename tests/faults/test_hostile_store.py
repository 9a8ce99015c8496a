"""An attacker who can write to the store can stop readers, but cannot make them accept a version that was never published."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from publications import At, Ledger, Listener, assert_one_history, bits_at, open_publisher, open_subscriber, published, visible_step
from support import bits_of
from toy_chain import ToyChain, first_state

from deltawire.chain import log
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines.disk import DiskEngine
from deltawire.engines.hot_swap import HotSwap
from deltawire.errors import (
    ChainBroken,
    ChainError,
    CorruptRecord,
    DeltawireError,
    LimitExceeded,
    ObjectExists,
    RollbackDetected,
    RunMismatch,
    SignatureInvalid,
    UnsupportedVersion,
)
from deltawire.events import Event
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.format.records.record_parts import Limits, record_hash
from deltawire.format.records.run_records import Head
from deltawire.format.records.signing import SigningKey
from deltawire.format.records.version_records import Commit
from deltawire.store import Store, keys
from deltawire.store.local import LocalStore
from deltawire.store.memory import MemoryStore
from deltawire.testing import Before, FaultyStore

HEADS = {
    "missing": None,
    "empty": b"",
    "garbage": b"\x00\xff" * 50,
    "too large": b" " * 70_000,
    "too old": Head(0).to_bytes(),
    "beyond the end": Head(1000).to_bytes(),
    "as far as can be": Head(2**63 - 1).to_bytes(),
    "negative": b'{"deltawire":"head","seq":-1,"version":1}',
    "no number": b'{"deltawire":"head","seq":"3","version":1}',
    "of another version": b'{"deltawire":"head","seq":3,"version":2}',
}


def edited(data: bytes, **fields: Any) -> bytes:
    """Return a record with some fields replaced, in canonical form."""
    return json.dumps(json.loads(data) | fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


COMMITS: dict[str, tuple[Callable[[bytes], bytes], type[Exception]]] = {
    "empty": (lambda data: b"", CorruptRecord),
    "cut short": (lambda data: data[:-10], CorruptRecord),
    "flipped": (lambda data: bytes([data[0] ^ 1]) + data[1:], CorruptRecord),
    "with white space": (lambda data: data.replace(b",", b", "), CorruptRecord),
    "with another field": (lambda data: edited(data, more=1), CorruptRecord),
    "without a field": (lambda data: data.replace(b'"meta":{},', b""), CorruptRecord),
    "too large": (lambda data: edited(data, meta={"x": "y" * 70_000}), CorruptRecord),
    "of another version": (lambda data: edited(data, version=99), UnsupportedVersion),
    "for another slot": (lambda data: edited(data, seq=9), CorruptRecord),
    "of another run": (lambda data: edited(data, id="f" * 32), CorruptRecord),
    "with another parent": (lambda data: edited(data, parent="f" * 64), ChainBroken),
    "without the files that lead to it": (lambda data: edited(data, files=[], digest="f" * 32), CorruptRecord),
    "claiming too much": (lambda data: edited(data, state_bytes=2**60), LimitExceeded),
}


def replace(store: Store, key: str, data: bytes) -> None:
    store.delete([key])
    store.put(key, data)


@pytest.mark.parametrize("head", HEADS)
def test_a_wrong_or_hostile_head_costs_requests_only(head: str) -> None:
    store, ledger = published(4)
    data = HEADS[head]
    store.delete([keys.HEAD])
    if data is not None:
        store.put(keys.HEAD, data)
    assert visible_step(store) == ledger.newest
    with open_publisher(store) as publisher:
        if data is not None:
            store.put(keys.HEAD, data)
        ledger.publish(publisher, 2)
    if data is not None:
        store.put(keys.HEAD, data)
    assert visible_step(store) == ledger.newest
    assert_one_history(store, ledger)


@pytest.mark.parametrize("how", COMMITS)
def test_a_corrupt_commit_is_refused_and_the_reader_keeps_its_version(how: str) -> None:
    change, error = COMMITS[how]
    store, ledger = published(3)
    with open_subscriber(store) as reader:
        reader.sync()
        with open_publisher(store) as publisher:
            ledger.publish(publisher)
        good = store.get(keys.commit_key(5), limit=1 << 20)
        replace(store, keys.commit_key(5), change(good))
        for _ in range(2):
            with pytest.raises(error):
                reader.sync()
            assert bits_of(reader.state) == bits_at(2)
        replace(store, keys.commit_key(5), good)
        assert reader.sync().step == ledger.newest


@pytest.mark.parametrize("how", ["empty", "garbage", "of another version"])
def test_corrupt_shortcuts_and_pins_are_passed_over(how: str) -> None:
    store, ledger = published(13)
    for prefix in (keys.ANCHORS, keys.SKIPS):
        for info in list(store.list(prefix)):
            data = store.get(info.key, limit=1 << 20)
            replace(store, info.key, {"empty": b"", "garbage": b"\xff" * 40, "of another version": edited(data, version=2)}[how])
    store.put(keys.pin_key("somebody"), b"\xff")
    with open_subscriber(store, pin=True) as reader:
        assert reader.sync().step == ledger.newest
        assert bits_of(reader.state) == bits_at(12)
    with open_publisher(store) as publisher:
        assert publisher.version is not None
        assert publisher.version.step == ledger.newest


def test_a_publisher_does_not_build_on_a_commit_that_is_none() -> None:
    store, _ = published(2)
    store.put(keys.commit_key(3), b"not a commit")
    with pytest.raises(CorruptRecord):
        open_publisher(store)
    with open_subscriber(store) as reader:
        with pytest.raises(CorruptRecord):
            reader.sync()
        assert reader.version is None


def test_a_chain_that_claims_more_than_a_reader_allows_is_refused_before_anything_is_fetched() -> None:
    inner, ledger = published(2)
    for limit in ("state_bytes", "tensors", "file_bytes"):
        store = FaultyStore(inner)
        with open_subscriber(store, limits=dataclasses.replace(Limits(), **{limit: 1})) as reader:
            with pytest.raises(LimitExceeded):
                reader.sync()
            assert reader.version is None
        assert not [call for call in store.calls if call.key.startswith(keys.DATA)]
    assert visible_step(inner) == ledger.newest


@pytest.mark.parametrize("wrong", ["missing", "by another key", "of another record"])
def test_a_version_that_is_not_rightly_signed_is_refused(wrong: str, tmp_path: Path) -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    store = MemoryStore()
    chain = ToyChain(store, sign=key.sign)
    chain.anchor(first_state())
    for mirror in (None, tmp_path / "mirror"):
        with open_subscriber(store, mirror, trusted_keys=[key.public]) as reader:
            reader.sync()
            before = bits_of(chain.state)
            good = chain.delta()
            unsigned = dataclasses.replace(good, signature=None)
            bad = {
                "missing": unsigned,
                "by another key": other.sign(unsigned),
                "of another record": dataclasses.replace(good, step=999),
            }[wrong]
            replace(store, keys.commit_key(good.seq), bad.to_bytes())
            with pytest.raises(SignatureInvalid):
                reader.sync()
            assert bits_of(reader.state) == before
            replace(store, keys.commit_key(good.seq), good.to_bytes())
            assert reader.sync().seq == good.seq


def test_any_bit_that_flips_in_a_signed_commit_is_noticed() -> None:
    key = SigningKey.generate()
    store = MemoryStore()
    chain = ToyChain(store, sign=key.sign)
    chain.anchor(first_state())
    before = bits_of(chain.state)
    with open_subscriber(store, trusted_keys=[key.public]) as reader:
        reader.sync()
        good = chain.delta().to_bytes()
        for at in range(len(good)):
            store.put(keys.commit_key(2), good[:at] + bytes([good[at] ^ (1 << at % 7)]) + good[at + 1 :])
            with pytest.raises((ChainError, UnsupportedVersion)):
                reader.sync()
        assert bits_of(reader.state) == before
        store.put(keys.commit_key(2), good)
        assert reader.sync().seq == 2


def test_a_publisher_builds_on_no_chain_that_is_signed_otherwise_than_its_own_commits() -> None:
    old, new = SigningKey.generate(), SigningKey.generate()
    unsigned, _ = published(2)
    signed, ledger = published(6, signing_key=old)
    for store, options in ((unsigned, {"signing_key": new}), (signed, {"signing_key": new}), (signed, {})):
        before = [info.key for info in store.list("")]
        for resume_from_seq in (None, 1):
            with pytest.raises(SignatureInvalid):
                open_publisher(store, resume_from_seq=resume_from_seq, **options)
        assert [info.key for info in store.list("")] == before  # no epoch was claimed
    with pytest.raises(ValueError, match="signing_key"):
        open_publisher(unsigned, trusted_keys=[old.public])
    with open_publisher(signed, signing_key=new, trusted_keys=[old.public]) as publisher:
        ledger.publish(publisher, 6)
    with open_subscriber(signed, trusted_keys=[old.public, new.public]) as reader:
        assert reader.sync().step == ledger.newest
        assert bits_of(reader.state) == bits_at(11)
    with pytest.raises(SignatureInvalid):  # because its fence would have to link to commits that the old key signed
        open_publisher(signed, signing_key=new)


def test_a_signing_publisher_takes_no_unsigned_commit_for_its_base() -> None:
    """The unsigned commit arrives at every call of opening the publisher: before the publisher looks, or in the slot of its fence."""
    key = SigningKey.generate()
    refused = index = 0
    while True:
        inner, ledger = published(2, signing_key=key)

        last = inner.get(keys.commit_key(2), limit=65536)
        forged = dataclasses.replace(
            Commit.parse(last), seq=3, parent=record_hash(last), links=(), signature=None, state_seq=3, nonce="0" * 32
        ).to_bytes()

        def intrude(inner: MemoryStore = inner, forged: bytes = forged) -> None:
            with contextlib.suppress(ObjectExists):
                inner.put_if_absent(keys.commit_key(3), forged)

        store = FaultyStore(inner, [Before(At(index, intrude), "crash", times=None)])
        try:
            with open_publisher(store, signing_key=key) as publisher:
                ledger.publish(publisher)
            if index >= len(store.calls):
                break
        except SignatureInvalid:
            refused += 1
        else:
            with open_subscriber(inner, trusted_keys=[key.public]) as reader:
                assert reader.sync().step == ledger.newest
        index += 1
    assert refused > 3
    assert index > refused


def test_a_shortcut_that_is_not_rightly_signed_is_passed_over() -> None:
    key = SigningKey.generate()
    store = MemoryStore()
    chain = ToyChain(store, sign=key.sign)
    chain.anchor(first_state())
    chain.grow(12)
    chain._sign = lambda record: record
    chain.add_anchor(13)
    chain.add_skip(9, 1)
    with open_subscriber(store, trusted_keys=[key.public]) as reader:
        assert reader.sync(seq=1).seq == 1
        assert reader.sync().seq == 13
        assert bits_of(reader.state) == bits_of(chain.state)


def copy_of(store: Store) -> dict[str, bytes]:
    return {info.key: store.get(info.key, limit=info.size) for info in store.list("")}


def restore(store: Store, copy: dict[str, bytes]) -> None:
    store.delete(info.key for info in list(store.list("")))
    for key, data in copy.items():
        store.put(key, data)


def test_a_reader_that_saw_newer_versions_refuses_a_store_that_was_set_back(tmp_path: Path) -> None:
    store, ledger = published(2)
    older = copy_of(store)
    with open_publisher(store) as publisher:
        ledger.publish(publisher, 2)
    memory = open_subscriber(store)
    memory.sync()
    with open_subscriber(store, tmp_path / "mirror") as reader:
        reader.sync()
    restore(store, older)
    with open_subscriber(store, tmp_path / "mirror") as reader:  # another process, some time later
        for _ in range(2):
            with pytest.raises(RollbackDetected):
                reader.sync()
        assert reader.version is not None
        assert bits_of(reader.state) == bits_at(3)
    with open_publisher(store) as publisher:  # the trainer continues from the older copy, so its history differs from the first one
        Ledger(first=20).publish(publisher, 4)
    with open_subscriber(store, tmp_path / "mirror") as reader:
        with pytest.raises(RollbackDetected):
            reader.sync()
        assert bits_of(reader.state) == bits_at(3)
    with pytest.raises((RollbackDetected, ChainBroken)):
        memory.sync()
    assert bits_of(memory.state) == bits_at(3)
    assert visible_step(store) == 23  # a reader that never saw the newer copy cannot notice


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("versions", [0, 1, 6])
def test_a_running_follower_notices_that_its_store_was_set_back(
    versions: int, mirrored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer does not continue from there, or publishes fewer versions than the follower has seen, or more."""
    store, ledger = published(2)
    older = copy_of(store)
    with open_publisher(store) as publisher:
        ledger.publish(publisher, 3)
    newer = copy_of(store)
    monkeypatch.setattr(log, "_RECHECK_SECONDS", 0.0)
    monkeypatch.setattr(log, "_SURE_AFTER", 0.0)
    events = Listener()
    with open_subscriber(store, tmp_path / "mirror" if mirrored else None, on_event=events) as reader:
        following = reader.follow(poll=1e-4)
        assert next(following).step == 4
        restore(store, older)
        if versions:
            with open_publisher(store) as publisher:
                Ledger(first=20).publish(publisher, versions)
        with pytest.raises(RollbackDetected):
            next(following)
        assert isinstance(reader.last_error, RollbackDetected)
        assert [event.fields["error"] for event in events.events if event.name == "sync-failed"] == ["RollbackDetected"]
        assert bits_of(reader.state) == bits_at(4)
    loaded: list[Any] = []
    restore(store, newer)
    engine = DiskEngine(tmp_path / "engine", reload=lambda path, version: loaded.append(bits_of(Checkpoint(path))))
    with HotSwap(store, engine, options=ReaderOptions(pin=False, patience=0.0)) as swap:
        following = swap.follow(poll=1e-4)
        assert next(following).step == 4
        restore(store, older)
        with pytest.raises(RollbackDetected):
            next(following)
        assert isinstance(swap.last_error, RollbackDetected)
        assert loaded == [bits_at(4)]


def test_a_follower_waits_for_a_store_that_shows_less_than_before_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests may go to a replica that is behind. The follower reports it, keeps serving, and continues when the replica has caught up."""
    store, ledger = published(2)
    older = copy_of(store)
    with open_publisher(store) as publisher:
        ledger.publish(publisher, 3)
    newer = copy_of(store)
    monkeypatch.setattr(log, "_RECHECK_SECONDS", 0.0)
    reported: list[str] = []

    def catch_up(event: Event) -> None:
        if event.name == "sync-failed":
            reported.append(str(event.fields["error"]))
            assert bits_of(reader.state) == bits_at(4)
            if len(reported) == 2:
                restore(store, newer)
                with open_publisher(store) as publisher:
                    ledger.publish(publisher)

    with open_subscriber(store, on_event=catch_up) as reader:
        following = reader.follow(poll=1e-4)
        assert next(following).step == 4
        restore(store, older)
        assert next(following).step == 5
        assert reported == ["RollbackDetected"] * 2
        assert reader.last_error is None


def test_a_history_that_was_rewritten_is_refused() -> None:
    store, ledger = published(4)
    with open_subscriber(store) as reader:
        reader.sync()
        with open_publisher(store) as publisher:
            ledger.publish(publisher, 2)
        commit = Commit.parse(store.get(keys.commit_key(5), limit=1 << 20))
        replace(store, keys.commit_key(5), dataclasses.replace(commit, time=0).to_bytes())
        with pytest.raises((ChainBroken, RollbackDetected)):
            reader.sync()
        assert bits_of(reader.state) == bits_at(3)


def test_a_pipe_in_place_of_any_object_is_refused_by_name_or_passed_over(tmp_path: Path) -> None:
    """Opening a pipe for reading waits for a writer, and here no process ever writes to it."""
    store = LocalStore(tmp_path / "store")
    ledger = Ledger()
    with open_publisher(store) as publisher:
        ledger.publish(publisher, 5)
    refused = set()
    with open_subscriber(store) as reader:
        reader.sync(seq=2)
        for info in list(store.list("")):
            data = store.get(info.key, limit=info.size)
            store.delete([info.key])
            (tmp_path / "store" / info.key).parent.mkdir(exist_ok=True)
            os.mkfifo(tmp_path / "store" / info.key)
            for read in (
                reader.sync,
                lambda: visible_step(store),
                lambda: verify(store, deep=True),
                lambda: collect(store, grace=0, dry_run=True),
            ):
                try:
                    read()
                except DeltawireError as error:
                    refused.add((info.key.split("/")[0], type(error).__name__))
            assert bits_of(reader.state) in (bits_at(1), bits_at(4))
            store.put(info.key, data)
    assert ("commit", "DataDamaged") in refused
    assert ("run.json", "DataDamaged") in refused
    assert {name for _, name in refused} <= {"DataDamaged", "DataMissing", "RollbackDetected"}
    assert visible_step(store) == ledger.newest


def test_another_run_at_the_same_location_is_refused() -> None:
    store, _ = published(2, run="ours")
    with pytest.raises(RunMismatch):
        open_publisher(store, run="theirs")
    with open_subscriber(store, run="theirs") as reader, pytest.raises(RunMismatch):
        reader.sync()
