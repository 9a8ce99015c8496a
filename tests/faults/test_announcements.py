"""An announcement is a hint that anyone may forge, and a promise that a writer may not keep. It costs bytes, and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from announced_files import announce_at_once, look_and_arrive
from publications import Ledger, open_publisher, open_subscriber
from support import bits_of
from toy_chain import State, ToyChain, first_state, next_state

from deltawire.chain.maintenance.collect import collect
from deltawire.errors import DeltawireError
from deltawire.format.records.announcement_records import Announcement
from deltawire.format.records.record_parts import CommitRef, FileEntry
from deltawire.format.records.signing import SigningKey
from deltawire.store import keys
from deltawire.store.local import LocalStore
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.testing import Before, FaultyStore, ProcessDied, Reading
from deltawire.testing.faulty_store import Fault

KEY = SigningKey.generate()
Open = Callable[..., Subscriber]
Forge = Callable[[ToyChain, State], bytes]


@pytest.fixture(params=["memory", "mirror"])
def opened(request: pytest.FixtureRequest, tmp_path: Any) -> Open:
    numbers = iter(range(10**6))
    return lambda store, **options: open_subscriber(
        store, None if request.param == "memory" else tmp_path / f"mirror{next(numbers)}", **options
    )


@pytest.fixture(params=["memory", "local"])
def chain(request: pytest.FixtureRequest, tmp_path: Any) -> ToyChain:
    made = ToyChain(MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "store"))
    made.anchor(first_state())
    return made


def files_of_other_weights(chain: ToyChain) -> tuple[FileEntry, ...]:
    return chain.delta_files(chain.state, next_state(chain.state, 77))


def shifted(files: Sequence[FileEntry], **changes: Any) -> list[FileEntry]:
    return [dataclasses.replace(entry, **changes) for entry in files]


def uploaded(chain: ToyChain, data: bytes, **fields: Any) -> FileEntry:
    return chain.upload(data, "safetensors", raw=100, **{"first": 0, "count": 1, **fields})


def truthful(chain: ToyChain, new: State) -> Announcement:
    return chain.announcement(chain.delta_files(chain.state, new))


FORGED: dict[str, Forge] = {
    "no record": lambda chain, new: b"{}",
    "no text": lambda chain, new: bytes(range(256)),
    "too large": lambda chain, new: b" " * 70_000,
    "another version of the record": lambda chain, new: truthful(chain, new).to_bytes().replace(b'"version":1', b'"version":2'),
    "of another run": lambda chain, new: dataclasses.replace(truthful(chain, new), id="0" * 32).to_bytes(),
    "for another base": lambda chain, new: chain.announcement(
        files_of_other_weights(chain), base=CommitRef(1, "0" * 64, chain.ref(1).digest)
    ).to_bytes(),
    "other weights": lambda chain, new: chain.announcement(files_of_other_weights(chain)).to_bytes(),
    "other weights and right ones": lambda chain, new: chain.announcement(
        [chain.delta_files(chain.state, new)[0], files_of_other_weights(chain)[1]]
    ).to_bytes(),
    "other tensors": lambda chain, new: chain.announcement(shifted(chain.delta_files(chain.state, new)[:1], first=2)).to_bytes(),
    "more tensors than there are": lambda chain, new: chain.announcement(
        shifted(chain.delta_files(chain.state, new)[1:], count=900)
    ).to_bytes(),
    "larger files": lambda chain, new: chain.announcement(
        [dataclasses.replace(entry, size=entry.size + 1) for entry in chain.delta_files(chain.state, new)]
    ).to_bytes(),
    "smaller files": lambda chain, new: chain.announcement(shifted(chain.delta_files(chain.state, new), size=1)).to_bytes(),
    "files that no memory can hold": lambda chain, new: chain.announcement(
        shifted(chain.delta_files(chain.state, new), size=2**60)
    ).to_bytes(),
    "no deltas": lambda chain, new: chain.announcement([uploaded(chain, b"something else " * 20)]).to_bytes(),
    "a delta of another model": lambda chain, new: chain.announcement(
        [dataclasses.replace(chain.delta_files(first_state(5), next_state(first_state(5), 6))[0], first=0)]
    ).to_bytes(),
    "no files": lambda chain, new: chain.announcement([]).to_bytes(),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_announcement_wastes_bytes_and_nothing_else(chain: ToyChain, opened: Open, forged: str) -> None:
    """The commit contradicts the announcement: it has other files, other sizes or other content under the same number."""
    with opened(chain.store) as reader:
        reader.sync()
        before = bits_of(reader.state)
        new = next_state(chain.state, 1)
        chain.store.put(keys.COMING, FORGED[forged](chain, new))
        for _ in range(2):
            assert not look_and_arrive(reader)
            assert bits_of(reader.state) == before
        chain.delta(new)
        assert reader._look()
        assert reader.sync().seq == 2
        assert bits_of(reader.state) == bits_of(new)
        assert not look_and_arrive(reader)  # the announcement is still there, and out of date
        chain.grow(2)
        assert reader.sync().seq == 4
        assert bits_of(reader.state) == bits_of(chain.state)


def test_announced_files_that_are_missing_or_damaged_are_fetched_after_the_commit(chain: ToyChain, opened: Open) -> None:
    with opened(chain.store) as reader:
        reader.sync()
        new = next_state(chain.state, 1)
        files = chain.delta_files(chain.state, new)
        intact = [chain.store.get(entry.key, limit=1 << 20) for entry in files]
        chain.damage(files[0])
        chain.lose(files[1])
        chain.announce(files)
        assert not look_and_arrive(reader)
        assert bits_of(reader.state) == bits_of(chain.state)
        for entry, data in zip(files, intact, strict=True):
            chain.store.put(entry.key, data)
        chain.delta(new, files)
        assert reader.sync().seq == 2
        assert bits_of(reader.state) == bits_of(new)


def test_an_announcement_that_never_gets_its_commit_costs_nothing_but_bytes(chain: ToyChain, opened: Open) -> None:
    """The trainer died after it had announced. The next one makes another version from the same weights."""
    with opened(chain.store) as reader:
        reader.sync()
        chain.announce(files_of_other_weights(chain))
        assert not look_and_arrive(reader)
        chain.claim(2)
        assert reader.sync().seq == 1
        assert not look_and_arrive(reader)
        assert not reader._ahead._files  # it was of a replaced writer, and for another base
        chain.delta()
        assert reader.sync().seq == 3
        assert bits_of(reader.state) == bits_of(chain.state)


def test_a_replaced_trainer_announces_to_nobody(chain: ToyChain, opened: Open) -> None:
    """It does not know yet that it was replaced, and announces more files for its old base, or even for the fence that replaced it."""
    with opened(chain.store) as reader:
        reader.sync()
        files = files_of_other_weights(chain)
        late = chain.announcement(files)
        chain.claim(2)
        reader.sync()
        for each in (late, dataclasses.replace(late, seq=3, base=chain.ref(2), files=())):
            chain.store.put(keys.COMING, each.to_bytes())
            assert not look_and_arrive(reader)
            assert not reader._ahead._files
        chain.delta()
        reader.sync()
        assert bits_of(reader.state) == bits_of(chain.state)


@pytest.mark.parametrize("signature", ["none", "of another key", "of other content"])
def test_an_announcement_that_no_trusted_key_signed_is_ignored(opened: Open, signature: str) -> None:
    chain = ToyChain(MemoryStore(), sign=KEY.sign)
    chain.anchor(first_state())
    with opened(chain.store, trusted_keys=[KEY.public], run="toy") as reader:
        reader.sync()
        new = next_state(chain.state, 1)
        files = chain.delta_files(chain.state, new)
        signed = chain.announcement(files)
        bad = {
            "none": dataclasses.replace(signed, signature=None),
            "of another key": SigningKey.generate().sign(signed),
            "of other content": dataclasses.replace(signed, number=1),
        }[signature]
        chain.store.put(keys.COMING, bad.to_bytes())
        assert not look_and_arrive(reader)
        assert not reader._ahead._files
        chain.store.put(keys.COMING, signed.to_bytes())
        assert not look_and_arrive(reader)
        assert set(reader._ahead._files) == set(files)
        chain.delta(new, files)
        reader.sync()
        assert bits_of(reader.state) == bits_of(new)


def test_what_is_fetched_ahead_is_bounded_whatever_is_announced(opened: Open) -> None:
    """Announcements change at every look, and name more and more files. For one version no more than the budget is ever fetched."""
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state())
    store = FaultyStore(chain.store)
    budget = 5000
    with opened(store, ahead_bytes=budget) as reader:
        reader.sync()
        made = [uploaded(chain, bytes([number]) * 997) for number in range(30)]
        sizes = {entry.key: entry.size for entry in made}
        for number in range(0, 30, 3):
            chain.announce(made[number : number + 3])
            assert not look_and_arrive(reader)
            assert sum(entry.size for entry in reader._ahead._files) <= budget
        read = [call.key for call in store.calls if call.op == "read_into" and call.key in sizes]
        assert 0 < sum(sizes[key] for key in read) <= budget
        chain.delta()
        reader.sync()
        assert not reader._ahead._files
        assert bits_of(reader.state) == bits_of(chain.state)


FAULTS: dict[str, Callable[[int], Fault]] = {
    "unavailable": lambda index: Before(index, "unavailable"),
    "missing": lambda index: Reading(index, "missing"),
    "flip": lambda index: Reading(index, "flip"),
    "truncate": lambda index: Reading(index, "truncate"),
    "crash": lambda index: Before(index, "crash"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_store_that_fails_at_any_call_of_a_reader_that_fetches_ahead_spoils_nothing(opened: Open, kind: str) -> None:
    index = 0
    while True:
        chain = ToyChain(MemoryStore())
        chain.anchor(first_state())
        with opened(chain.store) as reader:
            reader.sync()
            store = FaultyStore(chain.store, [FAULTS[kind](index)])
            for holder in (reader._chain.log, reader._ahead._log):
                holder.store = store
            new = next_state(chain.state, 1)
            files = chain.delta_files(chain.state, new)
            chain.announce(files)
            for _ in range(2):
                with contextlib.suppress(DeltawireError, ProcessDied):
                    look_and_arrive(reader)
                assert bits_of(reader.state) == bits_of(chain.state)
            chain.delta(new, files)
            for _ in range(3):
                store.died = False
                with contextlib.suppress(DeltawireError, ProcessDied):
                    reader.sync()
                assert bits_of(reader.state) in (bits_of(new), bits_of(chain.states[1] or {}))
            assert reader.version is not None
            assert reader.version.seq == 2
            assert bits_of(reader.state) == bits_of(new)
        if index >= len(store.calls):
            assert index > 5
            return
        index += 1


def test_files_of_a_version_that_was_never_committed_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit of a version is refused by the store, so its files are orphans. Later versions of the same trainer let them go."""
    announce_at_once(monkeypatch)
    ledger = Ledger()
    inner = MemoryStore()
    refused = [False]
    store = FaultyStore(inner, [Before(lambda call: refused[0] and call.op == "put_if_absent", "full", times=None)])
    with open_publisher(store) as publisher:
        ledger.publish(publisher, 2)
        refused[0] = True
        with pytest.raises(DeltawireError):
            ledger.publish(publisher)
        refused[0] = False
        before = {info.key for info in inner.list(keys.DATA)}
        announced = Announcement.parse(inner.get(keys.COMING, limit=1 << 16))
        orphans = {entry.key for entry in announced.files}
        assert orphans <= before
        ledger.publish(publisher, 12)
        for _ in range(2):
            collect(inner, grace=0)
        assert not orphans & {info.key for info in inner.list(keys.DATA)}
        with open_subscriber(inner) as reader:
            assert reader.sync().step == ledger.newest
