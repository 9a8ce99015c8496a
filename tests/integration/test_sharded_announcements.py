"""Several processes announce the files of a version before its commit. Announcements are hints, whatever becomes of the version."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
from announced_files import look_and_arrive
from support import bits_of
from test_sharded_publisher import next_state, states
from threads_as_ranks import run_ranks, shards_of

from deltawire import Subscriber
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import StoreDenied
from deltawire.format.records.announcement_records import Announcement
from deltawire.format.records.signing import SigningKey
from deltawire.publish.sharded import ShardedPublisher
from deltawire.publish.upload import announcer
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import keys
from deltawire.store.base import Store
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore
from deltawire.testing import ProcessDied

SIZE = 3
LONGEST = 120


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(announcer, "INTERVAL", 0.001)


class RanksStore(WrappedStore):
    """The store of one rank. It notes announcements, and calls `before` before each put of data and each commit."""

    def __init__(self, inner: Store, before: Callable[[str], None] | None = None) -> None:
        super().__init__(inner)
        self.before = before
        self.announced: list[Announcement] = []
        self._changed = threading.Condition()

    def put(self, key, data, **options):
        if self.before is not None and key.startswith("data/"):
            self.before(key)
        super().put(key, data, **options)
        if key == keys.COMING:
            with self._changed:
                self.announced.append(Announcement.parse(data))
                self._changed.notify_all()

    def put_if_absent(self, key, data):
        if self.before is not None and keys.parse_commit_key(key) is not None:
            self.before(key)
        super().put_if_absent(key, data)

    def wait_for_files(self, count: int) -> None:
        """Return when an announcement has named so many files."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(len(each.files) >= count for each in self.announced), LONGEST)


def publish(stores, versions, began=lambda rank, number: None, starts_full=False, **options):
    """Publish versions from all ranks, each with its own store. Return what each rank returned, or its error."""

    def work(ranks):
        with ShardedPublisher(
            ranks, stores[ranks.rank], "shared", starts_full=starts_full, options=WriterOptions(threads=1, **options)
        ) as publisher:
            for number, state in enumerate(versions):
                began(ranks.rank, number)
                last = publisher.publish(shards_of(state, ranks.rank, SIZE))
            return last

    return run_ranks(SIZE, work)


def reading(store, **options):
    return Subscriber(store, options=ReaderOptions(pin=False, **options), threads=1)


def armed(stores, before):
    """Return a function that lets `before(rank, key)` watch the stores from version 1 on."""

    def began(rank, number):
        if number == 1:
            stores[rank].before = lambda key: before(rank, key)

    return began


@pytest.mark.parametrize("signed", [False, True])
def test_files_of_all_ranks_are_announced_before_the_commit_and_fetched_ahead(signed):
    inner, key = MemoryStore(), SigningKey.generate() if signed else None
    stores = [RanksStore(inner) for _ in range(SIZE)]
    versions = states(2)
    trust = {"trusted_keys": [key.public], "run": "shared"} if key is not None else {}
    ahead = []
    with contextlib.ExitStack() as opened:

        def before(rank, key):
            if key.startswith("data/") and rank == SIZE - 1:
                stores[0].wait_for_files(1)  # files of others are announced while this rank has uploaded nothing
            elif not key.startswith("data/"):
                stores[0].wait_for_files(SIZE)
                reader = opened.enter_context(reading(inner, **trust))
                reader.sync()
                assert not look_and_arrive(reader)
                ahead.append((reader, dict(reader._ahead._files)))

        found = publish(stores, versions, armed(stores, before), signing_key=key)
        assert not [each for each in found if isinstance(each, BaseException)], found
        [(reader, files)] = ahead
        assert len(files) == SIZE
        assert all(future.exception() is None for future in files.values())
        reader.sync()
        assert bits_of(reader.state) == bits_of(versions[1])
        last = stores[0].announced[-1]
        assert last.seq == reader.version.seq
        assert set(last.files) == set(files)


def test_nothing_is_announced_if_the_first_process_says_so():
    inner = MemoryStore()
    stores = [RanksStore(inner) for _ in range(SIZE)]
    found = publish(stores, states(3), announce=False)
    assert not [each for each in found if isinstance(each, BaseException)], found
    assert stores[0].announced == []


def test_a_rank_that_dies_after_others_have_announced_leaves_an_orphan_that_costs_only_bytes():
    inner = MemoryStore()
    stores = [RanksStore(inner) for _ in range(SIZE)]
    versions = states(3)

    def before(rank, key):
        if key.startswith("data/") and rank == SIZE - 1:
            stores[0].wait_for_files(2)
            raise ProcessDied("killed")

    with reading(inner) as reader:
        found = publish(stores, versions[:2], armed(stores, before))
        assert all(isinstance(each, BaseException) for each in found), found
        reader.sync()
        assert not look_and_arrive(reader)
        assert len(reader._ahead._files) == 2  # the orphan's
        assert bits_of(reader.state) == bits_of(versions[0])
        orphans = {entry.key for entry in stores[0].announced[-1].files}
        again = publish([inner] * SIZE, [versions[0], versions[2]], starts_full=True)  # so that a collection has a floor
        assert not [each for each in again if isinstance(each, BaseException)], again
        reader.sync()
        assert bits_of(reader.state) == bits_of(versions[2])
        assert not look_and_arrive(reader)
        assert not reader._ahead._files
    present = {each.key for each in inner.list("data/")}
    assert orphans <= present
    for _ in range(2):
        collect(inner, grace=0)
    assert orphans.isdisjoint(each.key for each in inner.list("data/"))
    with reading(inner) as late:
        late.sync()
        assert bits_of(late.state) == bits_of(versions[2])


def test_an_announcement_that_the_commit_contradicts_is_not_used():
    """The commit of a version is refused once. The same job then publishes other weights, with other files, under the same number."""
    inner = MemoryStore()
    stores = [RanksStore(inner) for _ in range(SIZE)]
    versions = states(2)
    other = next_state(versions[0], 99)
    refused = []

    def before(rank, key):
        if not key.startswith("data/") and not refused:
            stores[0].wait_for_files(SIZE)
            refused.append(key)
            raise StoreDenied("the disk is full")

    with contextlib.ExitStack() as opened:
        reader = None

        def work(ranks):
            nonlocal reader
            with ShardedPublisher(ranks, stores[ranks.rank], options=WriterOptions(threads=1)) as publisher:
                publisher.publish(shards_of(versions[0], ranks.rank, SIZE))
                armed(stores, before)(ranks.rank, 1)
                with pytest.raises(StoreDenied):
                    publisher.publish(shards_of(versions[1], ranks.rank, SIZE))
                if ranks.rank == 0:
                    reader = opened.enter_context(reading(inner))
                    reader.sync()
                    assert not look_and_arrive(reader)
                    assert len(reader._ahead._files) == SIZE
                return publisher.publish(shards_of(other, ranks.rank, SIZE))

        found = run_ranks(SIZE, work)
        assert not [each for each in found if isinstance(each, BaseException)], found
        assert reader is not None
        assert keys.parse_commit_key(refused[0]) == found[0].seq
        assert reader.sync().seq == found[0].seq
        assert bits_of(reader.state) == bits_of(other)
