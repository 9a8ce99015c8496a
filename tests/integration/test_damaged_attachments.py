"""Test that damaged or missing attachments are uploaded again, or that the publisher refuses before it fences another one off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attached_files import NEW, OLD, OPTIONS, flip, objects, states
from support import bits_of
from threads_as_ranks import run_ranks, shards_of
from toy_chain import ToyChain, first_state

from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import DataDamaged
from deltawire.publish.publisher import Publisher
from deltawire.publish.sharded import ShardedPublisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import keys, open_store
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.subscribe.model_files import read_model_files


def test_a_full_checkpoint_can_be_asked_for_and_repairs_a_damaged_chain() -> None:
    store, weights = MemoryStore(), states(3)
    with Publisher(store, attachments={"config.json": OLD}, options=OPTIONS) as publisher:
        for state in weights[:2]:
            publisher.publish(state)
    store.delete([info.key for info in store.list(keys.DATA)])
    with Publisher(store, attachments={"config.json": OLD}, starts_full=True, options=OPTIONS) as publisher:
        version = publisher.publish(weights[2])
        assert version.kind == "anchor"  # type: ignore[union-attr]
        assert publisher.publish(weights[1]).kind == "delta"  # type: ignore[union-attr]
    assert read_model_files(store).files == {"config.json": OLD}
    with Subscriber(store, options=ReaderOptions(pin=False, patience=0.0)) as reader:
        reader.sync()
        assert bits_of(reader.state) == bits_of(weights[1])


@pytest.mark.parametrize("is_lost", [False, True], ids=["damaged", "missing"])
@pytest.mark.parametrize("resume_from_seq", [None, 2, 3], ids=["newest", "older", "newest by number"])
def test_a_damaged_attachment_is_uploaded_again_if_the_publisher_has_it(resume_from_seq: int | None, is_lost: bool) -> None:
    store, weights = MemoryStore(), states(4)
    files = {"config.json": OLD, "tokenizer.json": b"[1, 2]"}
    with Publisher(store, attachments=files, options=OPTIONS) as publisher:
        for state in weights[:3]:
            publisher.publish(state)
    tokenizer = next(entry for entry in ChainLog(store).read(3).attachments or () if entry.name == "tokenizer.json")  # type: ignore[union-attr]
    if is_lost:
        store.delete([tokenizer.key])
    else:
        flip(store, tokenizer.key)
    with Publisher(store, attachments=files, resume_from_seq=resume_from_seq, options=OPTIONS) as publisher:
        assert publisher.version is not None
        opened_at = publisher.version.seq
        version = publisher.publish(weights[3])
        assert version.kind == "delta"  # type: ignore[union-attr]
    assert read_model_files(store).files == files
    if resume_from_seq == 2:  # the resume made a new version, which must be whole too
        commit = ChainLog(store).read(opened_at)
        assert commit is not None
        assert tokenizer.key not in {entry.key for entry in commit.attachments or ()}
    assert len(objects(store)) == 3 - is_lost
    assert verify(store, deep=True).problems == []


@pytest.mark.parametrize(
    "options", [{}, {"resume_from_seq": 2}, {"starts_full": True}, {"resume_from_seq": 2, "attachments": {"config.json": NEW}}]
)
def test_a_publisher_without_the_bytes_of_a_damaged_attachment_does_not_fence_others(options: Any) -> None:
    store, weights = MemoryStore(), states(3)
    with Publisher(store, attachments={"config.json": OLD}, options=OPTIONS) as publisher:
        for state in weights[:2]:
            publisher.publish(state)
        flip(store, next(iter(objects(store))))
        with pytest.raises(DataDamaged, match=r"config\.json, a file of version [12] in .*damaged"):
            Publisher(store, **options, options=OPTIONS)
        assert [info.key for info in store.list(keys.EPOCHS)] == [keys.epoch_key(1)]
        publisher.publish(weights[2])  # the first publisher is not fenced
    # a publisher that replaces the damaged file can continue
    with Publisher(store, attachments={"config.json": NEW}, options=OPTIONS) as publisher:
        publisher.publish(weights[0])
    assert read_model_files(store).files == {"config.json": NEW}


def test_resuming_from_a_record_of_version_1_with_a_damaged_attachment_does_not_fence_others() -> None:
    store = MemoryStore()
    chain = ToyChain(store)
    first = chain.anchor(first_state())
    chain.grow(2)
    chain.damage(next(entry for entry in first.files if entry.name == "config.json"))
    before = {info.key for info in store.list("")}
    with pytest.raises(DataDamaged):
        Publisher(store, resume_from_seq=first.seq, attachments={"config.json": NEW}, options=OPTIONS)
    assert {info.key for info in store.list("")} == before


def test_ranks_that_publish_together_upload_a_damaged_attachment_again(tmp_path: Path) -> None:
    weights, files = states(3), {"config.json": OLD, "tokenizer.json": b"[1, 2]"}
    store = open_store(tmp_path / "chain")

    def work(attachments: Any, numbers: range) -> Any:
        def publish(ranks: Any) -> None:
            own = attachments if ranks.rank == 0 else None
            with ShardedPublisher(ranks, tmp_path / "chain", options=WriterOptions(threads=1), attachments=own) as publisher:
                for number in numbers:
                    publisher.publish(shards_of(weights[number], ranks.rank, ranks.size), step=number)

        return publish

    assert run_ranks(2, work(files, range(2))) == [None, None]
    for key in objects(store):
        flip(store, key)
    assert [type(outcome) for outcome in run_ranks(2, work(None, range(0)))] == [DataDamaged, DataDamaged]
    assert run_ranks(2, work(files, range(2, 3))) == [None, None]
    assert read_model_files(store).files == files
    assert len(list(store.list(keys.EPOCHS))) == 2
