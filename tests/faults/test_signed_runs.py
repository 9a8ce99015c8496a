"""Signatures cover the name of a run and the versions that its writers abandoned. Collection counts only signed records.

A publisher checks the chain before it fences other publishers off.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from publications import Ledger, bits_at, open_publisher, open_subscriber, visible_step
from support import bits_of
from test_hostile_store import copy_of, edited, replace, restore
from threads_as_ranks import run_ranks

from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import ChainBroken, DataMissing, RunMismatch, SignatureInvalid, WrongRun
from deltawire.fleet.chain_versions import ChainVersions
from deltawire.format.records.run_records import Epoch
from deltawire.format.records.signing import SigningKey
from deltawire.publish.sharded import ShardedPublisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import keys
from deltawire.store.memory import MemoryStore
from deltawire.subscribe.model_files import read_model_files
from deltawire.subscribe.pull import pull


def signed_run(name: str, key: SigningKey, count: int = 2, **options: Any) -> MemoryStore:
    """Publish a signed run at memory://NAME. The URL gives the run its name."""
    store = MemoryStore(name)
    with open_publisher(store, signing_key=key, **options) as publisher:
        Ledger().publish(publisher, count)
    return store


def test_another_run_of_the_same_key_is_refused(tmp_path: Path) -> None:
    """One key signs the runs "prod" and "dev". An attacker copies dev to the location where readers look for prod."""
    key = SigningKey.generate()
    dev, prod = signed_run("dev", key, 3), signed_run("prod", key)
    trust = {"trusted_keys": [key.public]}
    with open_subscriber(prod, **trust) as reader:
        assert reader.sync().step == 1
    honest, forged = copy_of(dev), copy_of(dev)
    forged[keys.RUN] = edited(honest[keys.RUN], run="prod")
    for objects, error in ((honest, WrongRun), (forged, RunMismatch)):
        restore(prod, objects)
        for mirror in (None, tmp_path / "mirror"):
            with open_subscriber(prod, mirror, **trust) as reader:
                for _ in range(2):
                    with pytest.raises(error, match="'dev'"):
                        reader.sync()
                assert reader.version is None
        assert not (tmp_path / "mirror").exists()
        with pytest.raises(error):
            pull(prod, tmp_path / "out", options=ReaderOptions(pin=False, **trust))
        with pytest.raises(error):
            read_model_files(prod, options=ReaderOptions(**trust))
        with pytest.raises(error):
            open_publisher(prod, signing_key=key)
        with open_subscriber(prod, run="prod", **trust) as reader, pytest.raises(RunMismatch):
            reader.sync()
    restore(prod, honest)
    with open_subscriber(prod, tmp_path / "mirror", run="dev", **trust) as reader:  # the error suggests this option
        assert reader.sync().step == 2
    with open_subscriber(prod, tmp_path / "mirror", **trust) as reader:  # the mirror already follows that run
        assert reader.sync().step == 2
    with open_subscriber(prod) as reader:  # a reader that trusts no key accepts what the URL holds
        assert reader.sync().step == 2


def test_an_epoch_that_is_not_rightly_signed_abandons_nothing() -> None:
    """The record of an epoch says which versions a resume abandoned.

    No rewind says so if a collection has announced that it will delete the data of the version.
    """
    key = SigningKey.generate()
    store = signed_run("main", key, 9)
    collect(store, grace=0.0)
    with open_publisher(store, signing_key=key, resume_from_seq=7) as publisher:
        assert publisher.version is not None
        assert publisher.version.kind == "anchor"
    good = store.get(keys.epoch_key(2), limit=1 << 20)
    trusting = lambda: ChainVersions(ChainLog(store, trusted_keys=[key.public]))  # noqa: E731
    assert [trusting().find(seq).live for seq in (7, 8, 9)] == [True, False, False]
    unsigned = edited(good, signature=None, resumed_from=9)
    first = Epoch.parse(unsigned)
    of_version_1 = dataclasses.replace(first, version=1).to_bytes()
    for bad in (unsigned, of_version_1, SigningKey.generate().sign(first).to_bytes(), edited(good, resumed_from=9)):
        replace(store, keys.epoch_key(2), bad)
        with pytest.raises(SignatureInvalid):
            trusting().find(8)


def test_unsigned_checkpoints_do_not_count_when_a_signed_chain_is_collected() -> None:
    """If they counted, they would be the newest checkpoints, and the data of the signed ones would be deleted."""
    key = SigningKey.generate()
    store = signed_run("main", key, 9)
    log = ChainLog(store)
    for seq in (6, 7, 8, 9):
        anchor = log.shortcut(5)
        commit = log.read(seq)
        assert anchor is not None
        assert commit is not None
        forged = dataclasses.replace(anchor, target=log.ref(commit), signature=None, nonce=f"{seq:032}")
        store.delete([keys.anchor_key(seq)])
        store.put(keys.anchor_key(seq), forged.to_bytes())
    assert collect(store, grace=0.0).floor == 1
    with open_subscriber(store, trusted_keys=[key.public]) as reader:
        assert reader.sync().step == 8
        assert bits_of(reader.state) == bits_at(8)
    assert {problem.where for problem in verify(store).problems} == {keys.anchor_key(seq) for seq in (6, 7, 8, 9)}
    with open_publisher(store, signing_key=SigningKey.generate(), trusted_keys=[key.public]) as publisher:
        Ledger(first=9).publish(publisher)
    with pytest.raises(SignatureInvalid):  # there are two keys, so the collector needs to know which keys it can trust
        collect(store, grace=0.0)


def test_a_publisher_that_cannot_continue_does_not_fence_others(waiting: Any) -> None:
    store = MemoryStore("main")
    with open_publisher(store, attachments={"config.json": b"{}"}) as healthy:
        ledger = Ledger()
        ledger.publish(healthy, 3)
        for suffix in (".safetensors", ".file"):
            taken = {info.key: store.get(info.key, limit=1 << 20) for info in store.list(keys.DATA) if info.key.endswith(suffix)}
            store.delete(taken)
            before = [info.key for info in store.list("")]
            with pytest.raises(DataMissing):
                open_publisher(store)
            failed = run_ranks(1, lambda ranks: ShardedPublisher(ranks, store, options=WriterOptions(threads=1)))
            assert isinstance(failed[0], DataMissing)
            with pytest.raises(DataMissing):
                open_publisher(store, resume_from_seq=1)
            assert [info.key for info in store.list("")] == before  # no epoch was claimed
            ledger.publish(healthy)  # the first publisher continues
            for key, data in taken.items():
                store.put(key, data)
    assert visible_step(store) == ledger.newest


@pytest.mark.parametrize("number", [10**10 - 1, 10**10 - 2])
def test_a_claim_of_the_last_epoch_is_an_error_that_says_so(number: int) -> None:
    store = MemoryStore("main")
    with open_publisher(store) as publisher:
        Ledger().publish(publisher, 2)
    store.put(f"epoch/{number:010}.json", b"{}")
    with pytest.raises(ChainBroken, match="no number for another epoch"):
        open_publisher(store)
    assert visible_step(store) == 1
